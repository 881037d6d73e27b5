"""Linear attention: the gated delta rule as transformers computes it, and states that no schedule mixes up."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from tests.runtime.checkpoints import write_engine
from tests.runtime.conftest import greedy
from tests.runtime.converted import LONG, TOKENS, Families, error
from tests.runtime.runner import Runner
from tests.runtime.test_copies import copies
from tests.runtime.test_engine import requests_for
from tests.runtime.test_speculation import KeptRanks, Oracle
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.compile.stage import compile_engine
from trtforge.core.errors import ForgeError
from trtforge.core.features import DraftFeature
from trtforge.core.recipe import EngineConfig
from trtforge.formats.trtllm import DRAFT_ENGINE
from trtforge.runtime.decoder.delta_rule import Tokens, one_token, sequence
from trtforge.runtime.decoder.kv_capacity import block_bytes, block_count, states_bytes
from trtforge.runtime.decoder.sequence_states import SequenceStates, Spans, State
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.native.convolution import convolve
from trtforge.runtime.native.linear_attention import delta_inputs, norm_gated
from trtforge.runtime.ranks.source import Source, open_engine, open_model
from trtforge.runtime.scheduling.batch import Step

NAME = "qwen3_next"
COUNT, GROUPS, HEADS, KEY, VALUE = 150, 2, 4, 12, 10


def projected() -> dict[str, Tensor]:
    """Random inputs of the rule for a sequence, with memory that lasts for dozens of tokens."""
    generator = torch.Generator().manual_seed(3)

    def made(*shape: int) -> Tensor:
        return torch.randn(COUNT, *shape, generator=generator)

    return {
        "query": made(GROUPS, KEY),
        "key": made(GROUPS, KEY),
        "value": made(HEADS, VALUE),
        "beta": made(HEADS).sigmoid(),
        "g": -0.1 * made(HEADS).exp(),
    }


def as_tokens(parts: dict[str, Tensor]) -> Tokens:
    return Tokens.of(parts["query"], parts["key"], parts["value"], parts["beta"], parts["g"])


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_a_sequence_is_computed_as_transformers_does(rule: str) -> None:
    parts = projected()
    found, state = sequence(as_tokens(parts), torch.zeros(HEADS, KEY, VALUE))
    batch = {name: part.unsqueeze(0) for name, part in parts.items()}
    expected, last = getattr(theirs, rule)(**batch, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert error(found, expected[0]) < 1e-5
    assert error(state, last[0]) < 1e-5


@pytest.mark.parametrize("cuts", [(1,), (64,), (63, 65), (1, 2, 3, 149)])
def test_cuts_of_a_sequence_change_nothing(cuts: tuple[int, ...]) -> None:
    tokens, state = as_tokens(projected()), torch.zeros(HEADS, KEY, VALUE)
    whole, last = sequence(tokens, state)
    found = []
    for first, end in zip((0, *cuts), (*cuts, COUNT), strict=True):
        outputs, state = sequence(tokens[first:end], state)
        found.append(outputs)
    assert error(torch.cat(found), whole) < 1e-5
    assert error(state, last) < 1e-5


def test_single_tokens_of_several_sequences_are_those_of_a_sequence() -> None:
    tokens, state = as_tokens(projected()), torch.zeros(HEADS, KEY, VALUE)
    whole, last = sequence(tokens, state)
    _, before = sequence(tokens[:90], state)
    rows = torch.tensor([90, 0])
    found, after = one_token(tokens[rows], [before, state], [False, False])
    assert error(found, whole[rows]) < 1e-5
    assert error(after[1], sequence(tokens[:1], state)[1]) < 1e-5
    assert not state.any()
    for index in range(91, COUNT):
        found, after = one_token(tokens[index : index + 1], after[:1], [index % 2 == 0])
    assert error(after[0], last) < 1e-5


@settings(max_examples=40)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.just((128, 128)),
    spent=st.booleans(),
    seed=st.integers(0, 9),
)
def test_kernels_compute_single_tokens_as_torch_does(
    level: Native, rows: int, heads: int, sizes: tuple[int, int], spent: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    key, value = sizes
    queries, keys = (torch.randn(rows, heads, key, generator=generator) / key**0.5 for _ in range(2))
    values = torch.randn(rows, heads, value, generator=generator)
    rates = torch.rand(rows, heads, generator=generator)
    tokens = Tokens(queries, keys, values, rates, -torch.rand(rows, heads, generator=generator))
    states = [torch.randn(heads, key, value, generator=generator) for _ in range(rows)]
    before = [state.clone() for state in states]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "torch")
        expected, wanted = one_token(tokens, before, [spent] * rows)
    found, after = one_token(tokens, states, [spent] * rows)
    largest = max(float(part.abs().max()) for part in (values, *before))  # of the terms: sums of a few may cancel
    assert float((found - expected).abs().max()) < 1e-5 * largest
    assert float((torch.stack(after) - torch.stack(wanted)).abs().max()) < 1e-5 * largest
    assert all(new.data_ptr() == old.data_ptr() for new, old in zip(after, states, strict=True)) == spent
    assert spent or all(torch.equal(*pair) for pair in zip(states, before, strict=True))


@settings(max_examples=40)
@given(
    count=st.integers(1, 70),
    heads=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)) | st.just((128, 128)),
    seed=st.integers(0, 9),
)
def test_kernels_compute_sequences_as_torch_does(
    level: Native, count: int, heads: int, sizes: tuple[int, int], seed: int
) -> None:
    """Also of value sizes that fill no vectors; the state before them is left as it was."""
    generator = torch.Generator().manual_seed(seed)
    key, value = sizes
    queries, keys = (functional.normalize(torch.randn(count, heads, key, generator=generator), dim=2) for _ in "qk")
    values, rates = torch.randn(count, heads, value, generator=generator), torch.rand(count, heads, generator=generator)
    tokens = Tokens(queries, keys, values, rates, -torch.rand(count, heads, generator=generator))
    state = torch.randn(heads, key, value, generator=generator)
    before = state.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "torch")
        expected, wanted = sequence(tokens, state)
    found, after = sequence(tokens, state)
    largest = max(float(part.abs().max()) for part in (values, before))
    assert float((found - expected).abs().max()) < 1e-5 * largest
    assert float((after - wanted).abs().max()) < 1e-5 * largest
    assert torch.equal(state, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    count=st.integers(1, 40),
    channels=st.integers(1, 70),
    inputs=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_the_convolution_is_that_of_torch(
    level: Native, dtype: torch.dtype, rows: int, count: int, channels: int, inputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randn(rows, count + inputs - 1, channels, generator=generator).to(dtype)
    taps = torch.randn(inputs, channels, generator=generator)
    exact = functional.conv1d(window.double().mT, taps.double().t().unsqueeze(1), groups=channels).mT
    found = convolve(level, window, taps)
    assert (found.dtype, found.shape) == (dtype, (rows, count, channels))
    steps = 2**-7 if dtype is torch.bfloat16 else 1e-5
    largest = float(functional.silu(exact).abs().max()) + 1.0
    assert float((found.double() - functional.silu(exact)).abs().max()) < steps * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(
    tokens=st.integers(1, 40),
    key_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 9),
)
def test_the_kernel_makes_the_rules_inputs(
    level: Native, dtype: torch.dtype, tokens: int, key_heads: int, shared: int, sizes: tuple[int, int], seed: int
) -> None:
    """Normalised queries and keys of the value heads that share them, values, rates and decays, also large steps."""
    generator = torch.Generator().manual_seed(seed)
    (key, value), heads = sizes, key_heads * shared
    parts = torch.randn(tokens, 2 * key_heads * key + heads * value, generator=generator).to(dtype)
    projected = (8 * torch.randn(tokens, heads * 2, generator=generator)).to(dtype)
    decay, bias = torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    found = delta_inputs(level, parts, projected, decay, bias, (key_heads, key, value))
    exact = parts.double().split([key_heads * key, key_heads * key, heads * value], dim=1)
    queries, keys = (each.view(tokens, key_heads, key).repeat_interleave(shared, dim=1) for each in exact[:2])
    queries, keys = (each / (each.square().sum(dim=2, keepdim=True) + 1e-6).sqrt() for each in (queries, keys))
    rates, steps = (each.flatten(1) for each in projected.view(tokens, key_heads, 2, shared).unbind(dim=2))
    expected = (
        queries * key**-0.5,
        keys,
        exact[2].view(tokens, heads, value),
        rates.sigmoid().double(),
        -decay.double() * functional.softplus(steps.double() + bias.double()),
    )
    for name, own, wanted in zip(("queries", "keys", "values", "rates", "decays"), found, expected, strict=True):
        assert own.dtype is torch.float32
        assert float((own.double() - wanted).abs().max()) < 1e-5 * (1.0 + float(wanted.abs().max())), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(rows=st.integers(1, 300), size=st.integers(1, 70), seed=st.integers(0, 9))
def test_the_gated_norm_is_that_of_transformers(
    level: Native, dtype: torch.dtype, rows: int, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, gates = (4 * torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    module = theirs.Qwen3NextRMSNormGated(size, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(size, generator=generator))
        expected = module(x, gates).double()
    found = norm_gated(level, x, gates, module.weight.detach(), 1e-5)
    assert (found.dtype, found.shape) == (dtype, (rows, size))
    near = 2**-6 if dtype is torch.bfloat16 else 1e-5  # three numbers one after the other are rounded
    assert bool(((found.double() - expected).abs() <= near * (expected.abs() + 1e-3)).all())


def step(*rows: tuple[int, int, list[int]]) -> Step:
    """Rows as start, count and blocks."""
    starts, counts = (np.array([row[index] for row in rows]) for index in (0, 1))
    tables = np.zeros((len(rows), max(len(row[2]) for row in rows)), dtype=np.int64)
    for index, (_, _, blocks) in enumerate(rows):
        tables[index, : len(blocks)] = blocks
    return Step(starts, counts, counts, tables, np.zeros(counts.sum(), dtype=np.int64))


def test_drafts_are_computed_after_the_tokens_before_them() -> None:
    spans = Spans.of(step((4, 1, [3, 8]), (5, 1, [3, 8]), (9, 1, [7, 5, 0]), (6, 1, [3, 8]), (0, 5, [2, 9])))
    assert [[(span.block, span.start, span.first, span.end) for span in wave] for wave in spans.waves] == [
        [(3, 4, 0, 1), (7, 9, 2, 3), (2, 0, 4, 9)],
        [(3, 5, 1, 2)],
        [(3, 6, 3, 4)],
    ]
    assert spans.taken == {8, 5, 9}


def test_states_are_those_of_the_last_step_of_a_sequence() -> None:
    states = SequenceStates(State(torch.zeros(0), torch.zeros(0)))
    kept = [State(torch.zeros(0), torch.full((1,), float(index))) for index in range(4)]
    ((first,), (draft,)) = Spans.of(step((4, 1, [3, 8]), (5, 1, [3, 8]))).waves
    states.keep(first, kept[0], more=False)
    states.keep(draft, kept[1], more=True)
    for position in (5, 6):  # the draft was right, or wrong
        ((after,),) = Spans.of(step((position, 1, [3, 8]))).waves
        assert states.before(after) is kept[position - 5]
    states.keep(after, kept[2], more=False)
    with pytest.raises(AssertionError, match="no state of block 3 at position 6"):
        states.before(after)
    ((begun,),) = Spans.of(step((0, 4, [3]))).waves
    assert states.before(begun).memory.numel() == 0
    assert len(states) == 1
    states.forget(frozenset({3, 8}))
    assert len(states) == 0


@pytest.fixture(scope="module")
def source(families: Families, tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp(NAME) / "engine"
    made = write_engine(families(NAME).checkpoint(), directory, tokens_per_block=4, max_num_tokens=16)
    return open_engine(made)


def test_blocks_hold_the_keys_of_attention_only(source: Source) -> None:
    place, limits = Placement(torch.device("cpu"), torch.float32), source.limits
    spec = source.spec(0)
    assert block_bytes(spec, torch.float32, 4) == 4 * 4 * 24 * 4
    assert states_bytes(spec, torch.float32) == 3 * (8 * 12 * 10 + 3 * (2 * 48 + 80)) * 4
    assert block_count(spec, place, limits, 4, 0.9, 80) == 20
    ranks = ThreadRanks(source, 6)
    assert [tensor.numel() for tensor in ranks.models[0].cache] == [0, 0, 6 * 4 * 4 * 24, 0]
    ranks.close()


def test_prefixes_and_copies_are_computed_again(source: Source, families: Families) -> None:
    asked = [*requests_for([LONG[:13], LONG[:13]], 6), *copies(LONG[:13], 3, first=2, tokens=6)]
    expected = greedy(families(NAME).model, [LONG[:13]], 6)[0]
    ranks = KeptRanks(source, 60)
    with Engine(source, ranks, EngineOptions(chunked_context=True)) as engine:  # type: ignore[arg-type]
        alone = [generate_with(engine, [replace(each, copy_of=None)])[0].tokens for each in asked]
        made = [each.tokens for each in generate_with(engine, asked)]
        assert engine.statistics().kv_blocks_reused == 0
    ranks.end()
    assert made == alone
    assert made[:2] == [expected, expected]


def test_wrong_drafts_leave_nothing_behind(source: Source, families: Families, prompts: list[list[int]]) -> None:
    expected = greedy(families(NAME).model, prompts[:2], 24)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts[:2], expected, strict=True)}
    ranks = KeptRanks(source, 40)
    for right in (0, 2, 5):
        oracle = Oracle(answers, 5, right)  # type: ignore[arg-type]
        with Engine(source, ranks, EngineOptions(chunked_context=True), oracle) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, requests_for(prompts[:2]))
        assert [generation.tokens for generation in made] == expected
    ranks.end()


def test_states_of_ended_sequences_do_not_pile_up(source: Source, prompts: list[list[int]]) -> None:
    ranks = KeptRanks(source, 60)
    with Engine(source, ranks, EngineOptions(chunked_context=True)) as engine:  # type: ignore[arg-type]
        for _ in range(4):
            generate_with(engine, requests_for(prompts[:3], 5))
    attention: Any = ranks.models[0].layers._layers[0].attention
    assert 1 <= len(attention.states) <= 3
    ranks.end()


def test_bfloat16_rounds_where_transformers_does(families: Families) -> None:
    """The model in bfloat16 is 10 % off, because other experts are chosen; both are half as far from one another."""
    family = families(NAME)
    source, model = open_model(family.checkpoint(), compute_dtype="bfloat16"), deepcopy(family.model).bfloat16()
    with Runner(source, ThreadRanks(source, 8)) as runner:  # type: ignore[arg-type]
        found = runner.logits(TOKENS)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0].float()
    assert float((found - expected).norm() / expected.norm()) < 0.08


def test_requests_in_flight_on_processes_get_the_tokens_of_transformers(
    families: Families, prompts: list[list[int]], tmp_path: Path
) -> None:
    family = families(NAME)
    engine = write_engine(family.checkpoint(tp=2, pp=2), tmp_path / "engine")
    made = generate(engine, requests_for(prompts[:5]))
    assert [generation.tokens for generation in made] == greedy(family.model, prompts[:5], 24)


def test_what_would_need_other_states_is_refused(families: Families, tmp_path: Path) -> None:
    checkpoint = families(NAME).checkpoint()
    engine = write_engine(checkpoint, tmp_path / "engine")
    for what, options in (
        ("a directory for KV blocks", EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))),
        ("kv_cache_host_memory_bytes", EngineOptions(kv_cache_host_memory_bytes=1 << 24)),
        ("kv_event_buffer_max_size", EngineOptions(kv_event_buffer_max_size=10)),
    ):
        with pytest.raises(ForgeError, match=f"{what}: not supported for linear attention") as caught:
            Engine.load(engine, options)
        assert caught.value.hint == "Leave it out for this model."
    beams = EngineConfig.parse({"backend": "torch", "device": "cpu", "max_beam_width": 2}, "test")
    with pytest.raises(ForgeError, match="max_beam_width 2: not supported with linear attention"):
        compile_engine(beams, checkpoint, tmp_path / "beams")
    drafting = {"draft": {"engine": str(engine), "tokens": 3}}
    drafts = EngineConfig.parse({"backend": "torch", "device": "cpu", "features": drafting}, "test")
    with pytest.raises(ForgeError, match="a model with linear attention cannot draft"):
        compile_engine(drafts, checkpoint, tmp_path / "drafts")
    write_engine(checkpoint, engine / DRAFT_ENGINE)
    with pytest.raises(ForgeError, match="a model with linear attention cannot draft") as caught:
        Engine.load(engine, EngineOptions(speculation=DraftFeature()))
    assert caught.value.hint == "Draft with another model, or with engine.features.ngram."
