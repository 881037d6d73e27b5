"""Recorded steps compute what the layers compute, whatever changed since they were recorded."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.families import TINY
from tests.runtime.adapters import add_adapters, save_adapter
from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import LONG, Families, Family
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.dtypes import ModelDtype
from trtforge.runtime.cuda.triton_support import power_from
from trtforge.runtime.decoder.recorded import MOST_ROWS
from trtforge.runtime.ranks import single_tokens
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch import Step

BLOCK, SEQUENCES = 8, 6
COUNTS = (1, 2, 4)
"""Of rows: others are padded in bfloat16, because the vocabulary is no multiple of the kernels' tile."""
TOLERANCES: dict[ModelDtype, float] = {"bfloat16": 2**-5, "float32": 1e-5}
WIDE = ("qwen3", "qwen3_moe", "gpt_oss", "gemma", "gemma2", "gemma3")
"""With heads of 32 numbers: attention of 24 is torch's."""
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
SIZES = {"qk_nope_head_dim": 24, "v_head_dim": 16}
OTHERS: dict[str, dict[str, int]] = {
    **{name: {"head_dim": 32} for name in WIDE},
    **{name: SIZES | {"q_lora_rank": 32} for name in LATENT},
    "deepseek_v2_lite": SIZES,
}
"""Sizes with which the kernels compute everything in bfloat16, too."""
PLAIN = ("gpt2", "gpt_neox", "gptj", "falcon_40b", "nemotron", "bloom", "opt_post_norm", "cohere_qk_norm")
"""With LayerNorm; most have MLPs without gates."""
MIXED = ("mixtral", "qwen2_moe")
"""With experts."""
BY_KERNELS = (
    *("llama_biased", "llama_yarn", "granite", "qwen2_window", "phi3", "exaone4_no_window"),
    *(*WIDE, *LATENT, *PLAIN, *MIXED),
)
BY_TORCH = ("falcon_rw",)


@pytest.fixture(scope="module")
def networks(families: Families, tmp_path_factory: pytest.TempPathFactory) -> Families:
    """As `families`, those of OTHERS with other sizes."""
    wide: dict[str, Family] = {}

    def network(name: str) -> Family:
        if name not in OTHERS:
            return families(name)
        if name not in wide:
            wide[name] = Family(TINY[name](**OTHERS[name]), tmp_path_factory.mktemp(name))
        return wide[name]

    return network


def stepped(
    ranks: ThreadRanks, rows: list[int], at: int, *, beside: bool = False, adapters: Sequence[int] = ()
) -> Tensor:
    """Logits of one token at position `at` of these sequences.

    `beside`: in a step with a context that stays one, which is not recorded.
    """
    columns = 4
    tables = [[1 + columns * row + column for column in range(columns)] for row in rows]
    tokens = [LONG[row + at] for row in rows]
    starts, counts = [at] * len(rows), [1] * len(rows)
    if beside:
        tables.append([0] * columns)
        tokens += LONG[:3]
        starts, counts = [*starts, 0], [*counts, 3]
    each = np.array(counts)
    tasks = np.array([*adapters, *([0] if adapters and beside else [])], dtype=np.int64)
    step = Step(np.array(starts), each, np.minimum(each, 1), np.array(tables), np.array(tokens), adapters=tasks)
    logits = not_recorded(ranks, step) if beside else ranks.execute(step)
    assert logits is not None
    return logits[: len(rows)].clone()


def not_recorded(ranks: ThreadRanks, step: Step) -> Tensor | None:
    """The logits of a step whose chunks of contexts stay these."""
    with mock.patch.object(single_tokens, "MOST_CHUNKED", 0):
        return ranks.execute(step)


def some_sequences(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, SEQUENCES - 1), min_size=count, max_size=count, unique=True)


def engine_of(families: Families, name: str, directory: Path, dtype: ModelDtype = "bfloat16") -> ThreadRanks:
    return begun(families(name).checkpoint(), directory, dtype)


def begun(checkpoint: Path, directory: Path, dtype: ModelDtype) -> ThreadRanks:
    """An engine, with the first tokens of every sequence computed."""
    engine = write_engine(checkpoint, directory, dtype=dtype, tokens_per_block=BLOCK, max_seq_len=32)
    ranks = ThreadRanks(open_engine(engine), 1 + 4 * SEQUENCES)
    for at in range(3):
        stepped(ranks, list(range(SEQUENCES)), at, beside=True)
    return ranks


def recorded_rows(ranks: ThreadRanks, dtype: ModelDtype) -> tuple[int, ...]:
    """Rows of whole steps that are recorded; in bfloat16 of their layers, as torch computes an LM head of odd width."""
    (model,) = ranks.models
    assert model.graphs is not None
    of_steps, of_layers = model.graphs.captured_rows, model.layers.recorded_rows
    assert not (of_layers if dtype == "float32" else of_steps)
    return of_steps if dtype == "float32" else of_layers


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", BY_KERNELS)
def test_recorded_steps_equal_computed_ones(networks: Families, name: str, dtype: ModelDtype, tmp_path: Path) -> None:
    ranks = engine_of(networks, name, tmp_path / "engine", dtype)

    @settings(max_examples=12, deadline=None)
    @given(st.sampled_from(COUNTS).flatmap(some_sequences), st.integers(3, 20))
    def check(rows: list[int], at: int) -> None:
        for before in range(3, at):
            stepped(ranks, rows, before)
        computed = stepped(ranks, rows, at, beside=True)
        first, again = stepped(ranks, rows, at), stepped(ranks, rows, at)
        assert power_from(len(rows)) in recorded_rows(ranks, dtype)
        assert torch.equal(first, again)
        assert (first - computed).abs().max() <= TOLERANCES[dtype] * computed.abs().max()

    check()
    ranks.close()


@pytest.mark.parametrize("name", BY_KERNELS)
def test_recorded_steps_in_float32_equal_transformers(networks: Families, name: str, tmp_path: Path) -> None:
    """Their logits, and therefore greedy tokens."""
    ranks, rows = engine_of(networks, name, tmp_path / "engine", "float32"), list(range(SEQUENCES))
    for at in range(3, 24):
        made = stepped(ranks, rows, at)
    assert recorded_rows(ranks, "float32") == (power_from(SEQUENCES),)
    for row in rows:
        expected = networks(name).logits(LONG[row : row + 24])[-1]
        assert (made[row] - expected).abs().max() <= 2e-5 * expected.abs().max()
        assert made[row].argmax() == expected.argmax()
    ranks.close()


def test_whole_steps_are_recorded_in_bfloat16_too(tmp_path: Path) -> None:
    """Where the kernels compute the LM head; in any order of numbers of rows."""
    checkpoint = write_checkpoint(tiny_llama(vocab_size=160), tmp_path / "checkpoint", Layout())
    ranks = begun(checkpoint, tmp_path / "engine", "bfloat16")
    for at in range(3, 12):
        for rows in ([2], [0, 3, 4], [5, 1], [0, 1, 2, 3, 4, 5]):
            made = stepped(ranks, rows, at)
            assert torch.equal(stepped(ranks, rows, at), made)
            computed = stepped(ranks, rows, at, beside=True)
            assert (made - computed).abs().max() <= TOLERANCES["bfloat16"] * computed.abs().max()
    (model,) = ranks.models
    assert model.graphs is not None
    assert model.graphs.captured_rows == (1, 2, 4, 8)
    assert model.layers.recorded_rows == ()
    ranks.close()


CHUNKED = {"plain": Layout(), "two ranks": Layout(tp=2), "fp8 cache": Layout(kv="FP8"), "adapters": None}


@pytest.mark.parametrize("kind", CHUNKED)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_chunks_of_chunks_are_recorded_as_single_tokens(
    families: Families, dtype: ModelDtype, kind: str, tmp_path: Path
) -> None:
    """What their rows stored is what later tokens of their sequences read; every other one samples."""
    family, layout = families("llama"), CHUNKED[kind]
    adapted = layout is None
    plain = tiny_llama(vocab_size=128)
    checkpoint = family.checkpoint() if layout is None else write_checkpoint(plain, tmp_path / "checkpoint", layout)
    engine = write_engine(checkpoint, tmp_path / "engine", dtype=dtype, tokens_per_block=BLOCK, max_seq_len=32)
    saved = [save_adapter(family.model, tmp_path / f"a{number}", number) for number in range(2)]
    source = open_engine(add_adapters(engine, saved) if adapted else engine)
    alone, together = (ThreadRanks(source, 1 + 4 * SEQUENCES) for _ in range(2))
    of_two, of_third = ((2, 0), (1,)) if adapted else ((), ())
    for ranks in (alone, together):
        for at in range(3):
            stepped(ranks, [0, 1], at, adapters=of_two)
    tables, first = np.arange(1, 1 + 4 * 3).reshape(3, 4), 0

    def third(start: int, count: int) -> Step:
        """Tokens of the third sequence, the last one with logits."""
        of_row, tokens = np.array([start]), np.array(LONG[start : start + count])
        adapters = np.array(of_third, dtype=np.int64)
        return Step(of_row, np.array([count]), np.array([1]), tables[2:], tokens, adapters=adapters)

    rounded = 1 if dtype == "float32" else 2  # keys and values of each chunk, too

    def check_third(made: Tensor, end: int) -> None:
        """The logits of the third sequence's last token before `end`."""
        whole = not_recorded(alone, third(0, end))
        assert whole is not None
        assert (made - whole).abs().max() <= rounded * TOLERANCES[dtype] * whole.abs().max()

    for at, count in zip(range(3, 9), (4, 2, 4, 4, 7, 2), strict=True):
        samples = at % 2
        made = together.execute(
            Step(
                np.array([at, at, first]),
                np.array([1, 1, count]),
                np.array([1, 1, samples]),
                tables,
                np.array([LONG[at], LONG[1 + at], *LONG[first : first + count]]),
                adapters=np.array([*of_two, *of_third], dtype=np.int64),
            )
        )
        assert made is not None
        assert len(made) == 2 + samples
        expected = stepped(alone, [0, 1], at, adapters=of_two)
        assert (made[:2] - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
        first += count
        if samples:
            check_third(made[2:], first)
    for model in together.models:
        assert model.graphs is not None
        recorded = {power_from(rows) for rows in (*model.layers.recorded_rows, *model.graphs.captured_rows)}
        assert recorded >= ({4, 8, 16} if dtype == "float32" or not adapted else {4})  # others are padded, see COUNTS
    for count in (1, 5):  # without other sequences
        last = together.execute(third(first, count))
        assert last is not None
        first += count
        check_third(last, first)
    for ranks in (alone, together):
        ranks.close()


def test_chunks_of_latent_attention_stay_contexts(networks: Families, tmp_path: Path) -> None:
    """These take fewer products than as many single tokens."""
    ranks = engine_of(networks, "deepseek_v2", tmp_path / "engine", "float32")
    expected = stepped(ranks, [0, 1], 3)
    assert recorded_rows(ranks, "float32") == (2,)
    tables = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    tokens = np.array([LONG[3], LONG[4], *LONG[:3]])
    logits = ranks.execute(Step(np.array([3, 3, 0]), np.array([1, 1, 3]), np.array([1, 1, 0]), tables, tokens))
    assert logits is not None
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert recorded_rows(ranks, "float32") == (2,)
    ranks.close()


def test_steps_of_many_rows_are_computed(families: Families, tmp_path: Path) -> None:
    """MLPs compute them in parts, which torch puts together: smaller steps are recorded afterwards."""
    ranks = engine_of(families, "llama", tmp_path / "engine", "float32")
    many = 1025  # beyond MOST_ROWS, and what an MLP takes at once
    assert many > MOST_ROWS
    alike, tables = np.ones(many, dtype=np.int64), np.tile(np.arange(1, 5), (many, 1))
    logits = ranks.execute(Step(3 * alike, alike, alike, tables, LONG[3] * alike, adapters=0 * alike[:0]))
    assert logits is not None
    assert recorded_rows(ranks, "float32") == ()
    assert (logits - stepped(ranks, [0], 3)).abs().max() <= 1e-5 * logits.abs().max()
    assert recorded_rows(ranks, "float32") == (1,)
    ranks.close()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kv", ["FP8", "INT8"])
def test_steps_with_a_quantised_cache_are_recorded(kv: str, dtype: ModelDtype, tmp_path: Path) -> None:
    """The first recorded token reads what was recorded of itself, and a replayed one what replays stored."""
    checkpoint = write_checkpoint(tiny_llama(), tmp_path / "checkpoint", Layout(kv=kv))
    ranks, rows = begun(checkpoint, tmp_path / "engine", dtype), [0, 2, 3, 4]
    for at in range(3, 12):
        made = stepped(ranks, rows, at)
        computed = stepped(ranks, rows, at, beside=True)
        assert (made - computed).abs().max() <= TOLERANCES[dtype] * computed.abs().max()
    assert recorded_rows(ranks, dtype) == (4,)
    ranks.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_of_whole_recorded_steps_are_in_float32(tp: int, tmp_path: Path) -> None:
    """Ranks exchange their columns in bfloat16; a single one records their widening, too."""
    checkpoint = write_checkpoint(tiny_llama(vocab_size=128), tmp_path / "checkpoint", Layout(tp=tp))
    engine = write_engine(checkpoint, tmp_path / "engine", dtype="bfloat16", tokens_per_block=BLOCK, max_seq_len=32)
    ranks, rows = ThreadRanks(open_engine(engine), 1 + 4 * SEQUENCES), [0, 2, 3, 4]
    for at in range(12):
        computed = stepped(ranks, rows, at, beside=True)
        for made in (stepped(ranks, rows, at) for _ in range(2)):
            assert made.dtype is torch.float32
            assert made.shape == (4, 128)
            assert (made - computed).abs().max() <= TOLERANCES["bfloat16"] * computed.abs().max()
    assert [model.graphs and model.graphs.captured_rows for model in ranks.models] == [(4,)] * tp
    ranks.close()


def test_a_recording_with_adapters_computes_fewer_rows(tmp_path: Path) -> None:
    """Up to a power of two, as one of a whole step does; the others' adapters are those of their own step."""
    model = tiny_llama(vocab_size=128)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint")
    engine = write_engine(checkpoint, tmp_path / "engine", dtype="float32", tokens_per_block=BLOCK, max_seq_len=32)
    saved = [save_adapter(model, tmp_path / f"a{number}", number) for number in range(2)]
    ranks = ThreadRanks(open_engine(add_adapters(engine, saved)), 1 + 4 * SEQUENCES)
    for at in range(3):
        stepped(ranks, list(range(SEQUENCES)), at, beside=True)
    for rows in ([0, 1, 2, 3, 4], [5, 1, 0], [2, 3, 1, 0, 4, 5], [4], [3, 5]):
        adapters = tuple(1 + number % 2 for number in rows)
        computed = stepped(ranks, rows, 3, beside=True, adapters=adapters)
        first, again = (stepped(ranks, rows, 3, adapters=adapters) for _ in range(2))
        assert torch.equal(first, again)
        assert (first - computed).abs().max() <= 1e-5 * computed.abs().max()
    assert ranks.models[0].layers.recorded_rows == (1, 2, 4, 8)
    ranks.close()


def test_recordings_follow_the_adapters(families: Families, tmp_path: Path) -> None:
    """Rows change their adapters, and more adapters than memory was taken for come into use."""
    family = families("llama")
    engine = write_engine(
        family.checkpoint(), tmp_path / "engine", dtype="bfloat16", tokens_per_block=BLOCK, max_seq_len=32
    )
    saved = [save_adapter(family.model, tmp_path / f"a{number}", number) for number in range(4)]
    ranks = ThreadRanks(open_engine(add_adapters(engine, saved)), 1 + 4 * SEQUENCES)
    rows, seen = [0, 1, 2, 3], []
    for at in range(3):
        stepped(ranks, rows, at, beside=True)
    for adapters in ((0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 1, 1), (2, 1, 0, 2), (1, 2, 3, 4), (4, 3, 2, 1)):
        computed = stepped(ranks, rows, 3, beside=True, adapters=adapters)
        made = [stepped(ranks, rows, 3, adapters=adapters) for _ in range(2)]
        assert torch.equal(*made)
        assert (made[1] - computed).abs().max() <= 2**-5 * computed.abs().max()
        assert all((made[1] - other).abs().max() > 0.1 for other in seen)
        seen.append(made[1])
    assert ranks.models[0].layers.recorded_rows == (4,)
    ranks.close()


@pytest.mark.parametrize("name", BY_TORCH)
def test_networks_that_torch_computes_are_not_recorded(networks: Families, name: str, tmp_path: Path) -> None:
    ranks = engine_of(networks, name, tmp_path / "engine")
    made = [stepped(ranks, [0, 1], 3) for _ in range(2)]
    assert torch.equal(*made)
    (model,) = ranks.models
    assert model.layers.recorded_rows == ()
    assert model.graphs is None or model.graphs.captured_rows == ()
    ranks.close()
