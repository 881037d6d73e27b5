"""Whole prompts from graphs equal computed ones. On the CPU a graph is the computation itself, with the same memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import LONG, Families
from tests.runtime.cuda.captures import repeated
from tests.runtime.cuda.kernels import DEVICE, EVERY, paged
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.runtime.decoder import kv_cache
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.prompt_memory import PromptInputs, PromptMemory
from trtforge.runtime.decoder.step_graphs import Outputs, Replay, Shape, StepGraphs
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks import rank_model
from trtforge.runtime.ranks.source import Source, open_engine, open_model
from trtforge.runtime.scheduling.batch import Step

BLOCK, COLUMNS, SPARE = 8, 13, 30
ZERO = np.array([0])


def prompt_of(tokens: int, first_block: int = 1, *, wanted: int = 1, shift: int = 0) -> Step:
    """The first tokens of a prompt, in blocks from this one on."""
    table = first_block + np.arange(COLUMNS).reshape(1, -1)
    return Step(ZERO, np.array([tokens]), np.array([wanted]), table, np.array(LONG[shift:][:tokens]))


def memory() -> PromptMemory:
    """Whose graphs are for the first prompts already."""
    found = PromptMemory(BLOCK, SPARE, DEVICE)
    for padded in (64, 128):
        assert found.shape(prompt_of(padded)) is None
    return found


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(kv_cache, "paged_attention_for", lambda device: paged())
    monkeypatch.setattr(rank_model, "graph_capture_for", lambda *_: repeated)


@pytest.fixture(params=["none", "fp8", *(("int8",) if EVERY else ())])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    directory = tmp_path_factory.mktemp("prompts")
    layout = Layout(kv=None if request.param == "none" else request.param.upper())
    checkpoint = write_checkpoint(tiny_llama(), directory / "checkpoint", layout)
    return open_engine(write_engine(checkpoint, directory / "engine", tokens_per_block=BLOCK, max_seq_len=100))


def eager(ranks: ThreadRanks, step: Step) -> Tensor | None:
    """The logits without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.models[0], "_prompts", None)
        return ranks.execute(step)


def captured(ranks: ThreadRanks) -> tuple[int, ...]:
    found = ranks.models[0].prompt_graphs
    assert found is not None
    return found.captured_rows


@torch.inference_mode()
@pytest.mark.usefixtures("as_on_a_gpu")
def test_prompts_from_graphs_equal_computed_ones(source: Source) -> None:
    """Whatever prompt the graph computed before, and what follows the prompt; tokens that pad it change no block."""
    ranks = ThreadRanks(source, SPARE)
    for index, tokens in enumerate((40, 63, 2, 100, 65)):
        step = prompt_of(tokens, 1 + (index % 2) * COLUMNS, shift=0 if tokens == 100 else index)
        expected = eager(ranks, step)
        assert expected is not None
        hidden, cache = ranks.last_hidden().clone(), [layer.clone() for layer in ranks.models[0].cache]
        for layer in ranks.models[0].cache:
            layer[step.tables[0]] = 0
        made = ranks.execute(step)
        assert made is not None
        assert made.shape == expected.shape
        assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.allclose(ranks.last_hidden(), hidden, atol=1e-4)
        held = step.tables[0, : -(-tokens // BLOCK)]
        for layer, before in zip(ranks.models[0].cache, cache, strict=True):
            found, before = (each[held].flatten(0, 1)[:tokens] for each in (layer, before))
            if found.is_floating_point():
                assert (found - before).abs().max() <= 1e-5 * before.abs().max()
            else:
                assert (found != before).float().mean() < 0.01  # roundings, at most
    assert captured(ranks) == (64, 128)
    ranks.close()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_window", "bloom"])
def test_prompts_from_graphs_give_the_logits_of_transformers(families: Families, name: str) -> None:
    family = families(name)
    ranks = ThreadRanks(open_model(family.checkpoint(), DEVICE.type), 4)
    table = np.array([[1, 2]])
    for tokens in (20, 33, 11, 40):
        made = ranks.execute(Step(ZERO, np.array([tokens]), np.array([1]), table, np.array(LONG[:tokens])))
        assert made is not None
        expected = family.logits(LONG[:tokens])[-1]
        assert (made[0].cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert captured(ranks) == (64,)
    ranks.close()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_layers_with_windows_write_to_their_own_blocks(families: Families) -> None:
    family = families("qwen2_window")
    ranks = ThreadRanks(open_model(family.checkpoint(), DEVICE.type), 4, window_blocks=4)
    for tokens in (20, 33, 11):
        step = Step(ZERO, np.array([tokens]), np.array([1]), np.array([[1, 2]]), np.array(LONG[:tokens]))
        made = ranks.execute(replace(step, window_tables=np.array([[3, 1]])))
        assert made is not None
        expected = family.logits(LONG[:tokens])[-1]
        assert (made[0].cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()
    (model,) = ranks.models
    of_windows = [layer for layer in model.cache if len(layer) == 5 and not layer[2].any()]
    assert of_windows, "window block 2 is nobody's"
    for layer in of_windows:
        assert layer[3].flatten(1).any(1).all(), "32 tokens"
        assert layer[1].flatten(1).any(1).tolist() == [True] + [False] * 31
    assert captured(ranks) == (64,)
    ranks.close()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_chunks_without_logits(source: Source) -> None:
    """The first chunk of a longer prompt: single tokens afterwards attend to it."""
    ranks = ThreadRanks(source, SPARE)
    for index in range(3):
        assert ranks.execute(prompt_of(40, wanted=0, shift=index)) is None
    assert captured(ranks) == (64,)
    one, table = np.array([1]), 1 + np.arange(COLUMNS).reshape(1, -1)
    following = Step(np.array([40]), one, one, table, np.array(LONG[42:43]))
    made = ranks.execute(following)
    eager(ranks, prompt_of(40, wanted=0, shift=2))
    expected = ranks.execute(following)
    assert made is not None
    assert expected is not None
    assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()
    ranks.close()


def never(compute: Callable[[], Outputs], rows: int, wanted: int) -> tuple[Outputs, Replay]:
    raise AssertionError("nothing is captured")


def computed(batch: Batch) -> Outputs:
    raise AssertionError("nothing is computed")


def other_steps() -> dict[str, Step]:
    plain, two = prompt_of(9), np.array([9, 9])
    both = np.concatenate([plain.tokens, plain.tokens])
    return {
        "a later chunk": replace(plain, starts=np.array([8])),
        "two prompts": Step(np.array([0, 0]), two, two // 9, np.concatenate([plain.tables, plain.tables]), both),
        "one token": prompt_of(1),
        "logits of all tokens": replace(plain, wanted=plain.counts),
        "many tokens": Step(ZERO, np.array([2049]), np.array([1]), plain.tables, np.ones(2049, dtype=np.int64)),
        "tokens of the step before": replace(plain, tokens=-plain.tokens),
        "an adapter": replace(plain, adapters=np.array([3])),
        "a known length": replace(plain, length=9),
    }


@pytest.mark.parametrize("kind", other_steps())
def test_other_steps_are_computed_without_graphs(kind: str) -> None:
    graphs = StepGraphs(computed, never, memory())
    assert graphs.execute(other_steps()[kind]) is None


def test_the_second_prompt_of_about_a_length_has_a_graph() -> None:
    found = PromptMemory(BLOCK, SPARE, DEVICE)
    steps = (64, 65, 3, 128, 64)
    assert [found.shape(prompt_of(tokens)) for tokens in steps[:2]] == [None, None]
    assert [found.shape(prompt_of(tokens)) for tokens in steps[2:]] == [Shape(64, 1), Shape(128, 1), Shape(64, 1)]


def test_what_pads_a_prompt_lies_in_the_spare_block() -> None:
    inputs = PromptInputs(64, BLOCK, SPARE, DEVICE)
    inputs.fill(prompt_of(40, shift=2))
    inputs.fill(prompt_of(10, first_block=5))
    batch = inputs.batch()
    assert batch.tokens.tolist() == LONG[:10] + [0] * 54
    assert batch.positions.tolist() == [*range(10), *[0] * 54]
    assert batch.slots.tolist() == [*range(5 * BLOCK, 5 * BLOCK + 10), *[SPARE * BLOCK] * 54]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [9]
    assert batch.chunks is not None
    assert batch.chunks.tables.tolist() == [[5, 6, *[SPARE] * 6]]
    assert batch.chunks.rows.tolist() == [[0, 0, 10]]
