"""Prompts with rows of prompt tables get the answers of PEFT and of transformers' `inputs_embeds`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.adapters import add_adapters, save_adapter, with_adapter
from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.converted import Families
from tests.runtime.eagle_networks import write_network
from tests.runtime.tables import (
    VOCABULARY,
    asked,
    embedded_greedy,
    random_table,
    save_tuning,
    table_of,
    take_tables,
    with_tuning,
)
from tests.runtime.test_medusa import write_heads
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.features import DraftFeature, EagleFeature, LookaheadFeature, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import BeamParams, GenerationRequest, SamplingParams
from trtforge.runtime.decoder import kv_capacity
from trtforge.runtime.drafting import Drafter, NgramDrafter, Speculation
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate_with
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.lookahead import LookaheadDrafter
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks.source import open_engine

NEW = 12
SMALL = {"tokens_per_block": 4, "max_num_tokens": 64}
LOOKAHEAD = LookaheadFeature(window=3, ngram=3, verification=3)
TEXT = list(range(5, 22))
MIXED = [*TEXT[:6], *range(VOCABULARY, VOCABULARY + 9), *TEXT[6:], VOCABULARY + 2, VOCABULARY + 11, 7]
"""Text, rows in order, text, and rows again, one of them twice."""


def tuned(rows: int, prompt: list[int]) -> list[int]:
    return [*range(VOCABULARY, VOCABULARY + rows), *prompt]


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with small blocks and steps that takes tables."""
    return take_tables(write_engine(checkpoint, tmp_path_factory.mktemp("small") / "engine", **SMALL))


@pytest.fixture
def running(small: Path) -> Iterator[Engine]:
    ranks = KeptRanks(open_engine(small), 200)
    options = EngineOptions(kv_reuse=True, chunked_context=True)
    with Engine(open_engine(small), ranks, options) as engine:  # type: ignore[arg-type]
        yield engine
    ranks.end()


def answers(engine: Engine, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    made = generate_with(engine, requests)
    assert [each.error for each in made] == [None] * len(made)
    assert engine.statistics().kv_blocks_used == 0
    return [each.tokens for each in made]


@pytest.mark.parametrize(
    ("kernels", "layout"),
    [("native", {}), ("native", {"tp": 2}), ("native", {"tp": 2, "pp": 2}), ("torch", {})],
    ids=["one", "tp2", "tp2pp2", "torch"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral"])
def test_prompt_tuning_and_p_tuning_answer_as_peft(
    families: Families,
    tmp_path: Path,
    name: str,
    layout: dict[str, int],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    family = families(name)
    prompt = TEXT[:9]
    requests, expected = [], []
    for number, encoder in enumerate((False, True)):
        adapter = save_tuning(family.model, tmp_path / f"adapter{number}", 11, number, encoder=encoder)
        rows = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]
        requests.append(asked(number, tuned(11, prompt), rows, NEW))
        expected.append(greedy(with_tuning(family.model, adapter), [prompt], NEW)[0])
    plain = greedy(family.model, [prompt], NEW)[0]
    engine = take_tables(write_engine(family.checkpoint(**layout), tmp_path / "engine", **SMALL))
    ranks = KeptRanks(open_engine(engine), 60)
    for chunked in (True, False):
        options = EngineOptions(kv_reuse=chunked, chunked_context=chunked, max_num_tokens=8 if chunked else None)
        with Engine(open_engine(engine), ranks, options) as running:  # type: ignore[arg-type]
            for _ in range(2):  # the second time prefixes are reused
                assert answers(running, [*requests, asked(2, prompt, None, NEW)]) == [*expected, plain]
    ranks.end()
    assert len({*expected, plain}) == 3


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_split_embeddings(families: Families, tmp_path: Path, name: str, dim: int) -> None:
    family, rows = families(name), random_table(12, 3)
    checkpoint = family.checkpoint(tp=2, parallel_embedding=True, embedding_sharding_dim=dim)
    engine = take_tables(write_engine(checkpoint, tmp_path / "engine", **SMALL))
    ranks = KeptRanks(open_engine(engine), 60)
    with Engine(open_engine(engine), ranks, EngineOptions(chunked_context=True)) as running:  # type: ignore[arg-type]
        assert answers(running, [asked(0, MIXED, rows, NEW)]) == [embedded_greedy(family.model, MIXED, rows, NEW)]
    ranks.end()


@pytest.mark.parametrize(
    ("name", "scale"),
    [("gemma", 8.0), ("gemma2", 8.0), ("gemma3", 8.0), ("granite", 1.0), ("opt", 1.0), ("qwen3_next", 1.0)]
    + [(name, 1.0) for name in ("qwen2_moe", "deepseek_v2", "gpt_oss", "falcon_7b", "cohere")],
)
def test_rows_take_the_place_of_the_embedding_before_its_factor(
    families: Families, tmp_path: Path, name: str, scale: float
) -> None:
    """As in TensorRT-LLM. transformers multiplies `inputs_embeds` of Granite too, but not of Gemma (8 = 64 ** 0.5)."""
    family, rows = families(name), random_table(12, 4)
    expected = embedded_greedy(family.model, MIXED, rows, NEW)
    engine = take_tables(write_engine(family.checkpoint(), tmp_path / "engine", **SMALL))
    ranks = KeptRanks(open_engine(engine), 60)
    with Engine(open_engine(engine), ranks, EngineOptions(kv_reuse=True, chunked_context=True)) as running:  # type: ignore[arg-type]
        for _ in range(2):
            assert answers(running, [asked(0, MIXED, rows / scale, NEW)]) == [expected]
    ranks.end()


def test_processes_get_the_rows_with_their_steps(
    llama: LlamaForCausalLM, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Also those of steps that one message does not hold."""
    engine = take_tables(write_engine(write_checkpoint(llama, tmp_path / "c", Layout(tp=2)), tmp_path / "e"), 8 * 140)
    rows = random_table(140, 6, 64)
    prompt = tuned(120, prompts[0])
    with Engine.load(engine, EngineOptions(kv_cache_tokens=400)) as running:
        made = answers(running, [asked(0, prompt, rows, NEW), asked(1, MIXED, rows[:12], NEW)])
    assert made == [embedded_greedy(llama, prompt, rows, NEW), embedded_greedy(llama, MIXED, rows, NEW)]


def test_bfloat16_and_float16_tables_are_converted(llama: LlamaForCausalLM, running: Engine) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        rows = random_table(12, 8).to(dtype)
        assert answers(running, [asked(0, MIXED, rows, NEW)]) == [embedded_greedy(llama, MIXED, rows.float(), NEW)]


def test_blocks_are_shared_by_what_the_rows_hold(llama: LlamaForCausalLM, running: Engine) -> None:
    rows, other = random_table(12, 1), random_table(12, 2)
    moved = torch.cat([torch.zeros(3, 64), rows])  # the same rows under other ids
    shifted = [token + 3 if token >= VOCABULARY else token for token in MIXED]
    blocks = len(MIXED) // 4
    # Reused: nothing, all, all, the text before the first row, nothing of another extra id, all of the same.
    extra = [7 if token >= VOCABULARY else 0 for token in MIXED]
    of_text = [1] * len(MIXED)
    requests = [
        (asked(0, MIXED, rows, NEW), 0),
        (asked(0, MIXED, rows, NEW), blocks),
        (asked(0, shifted, moved, NEW), blocks),
        (asked(0, MIXED, other, NEW), 1),
        (replace(asked(0, MIXED, rows, NEW), prompt_table=table_of(rows, extra)), 1),
        (replace(asked(0, MIXED, rows, NEW), prompt_table=table_of(rows, extra)), blocks),
        (replace(asked(0, MIXED, rows, NEW), prompt_table=table_of(rows, of_text)), 0),
        (asked(0, MIXED[:6], None, NEW), 1),
    ]
    both = {True: embedded_greedy(llama, MIXED, rows, NEW), False: embedded_greedy(llama, MIXED, other, NEW)}
    for number, (request, reused) in enumerate(requests):
        (made,) = generate_with(running, [request])
        assert made.reused_blocks == reused, number
        if number < 7:
            assert made.tokens == both[number != 3], number


def drafter_of(kind: str) -> Drafter | None:
    return {"ngram": NgramDrafter(NGRAMS), "lookahead": LookaheadDrafter(LOOKAHEAD)}.get(kind)


def test_no_schedule_changes_answers(llama: LlamaForCausalLM, small: Path, prompts: list[list[int]]) -> None:
    """Nor do pauses, prefixes that others computed, drafts or neighbours without tables."""
    tables = [random_table(12, seed) for seed in range(3)]
    known: list[tuple[list[int], Tensor | None]] = [
        *((MIXED, rows) for rows in tables),
        (tuned(12, prompts[1]), tables[0]),
        (tuned(12, [*prompts[1][:9], *MIXED]), tables[0]),
        ([VOCABULARY + 1] * 6, tables[1]),
        (prompts[1], None),
        (MIXED[:6] + prompts[2], None),
    ]
    expected = [
        greedy(llama, [prompt], NEW)[0] if rows is None else embedded_greedy(llama, prompt, rows, NEW)
        for prompt, rows in known
    ]
    source = open_engine(small)
    ranks = KeptRanks(source, 60)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        numbers=st.lists(st.integers(0, len(known) - 1), min_size=1, max_size=9),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        most=st.sampled_from([8, 9, 17, 64]),
        batch=st.integers(1, 8),
        drafts=st.sampled_from(["", "ngram", "lookahead"]),
        ahead=st.booleans(),
    )
    def check(
        numbers: list[int], policy: SchedulerPolicy, reuse: bool, most: int, batch: int, drafts: str, ahead: bool
    ) -> None:
        ranks.computes_ahead = ahead  # of the tokens, as on a GPU
        options = EngineOptions(
            scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch, max_num_tokens=most
        )
        with Engine(source, ranks, options, drafter_of(drafts)) as running:  # type: ignore[arg-type]
            made = answers(running, [asked(place, *known[number], NEW) for place, number in enumerate(numbers)])
        assert made == [expected[number] for number in numbers]

    check()
    ranks.end()


def test_paused_prompts_are_computed_again_with_their_rows(llama: LlamaForCausalLM, small: Path) -> None:
    source, tables = open_engine(small), [random_table(12, seed) for seed in range(4)]
    ranks = KeptRanks(source, 26)
    options = EngineOptions(scheduler="max_utilization", kv_reuse=False, chunked_context=True)
    with Engine(source, ranks, options) as running:  # type: ignore[arg-type]
        made = answers(running, [asked(n, MIXED, rows, 40) for n, rows in enumerate(tables)])
        assert running.statistics().paused_requests > 0
    ranks.end()
    assert made == [embedded_greedy(llama, MIXED, rows, 40) for rows in tables]


def test_sampling_penalties_and_bad_words_see_only_tokens_of_the_vocabulary(running: Engine) -> None:
    """Rows are no tokens: what they are named changes nothing, and a prompt of rows alone is penalised as none."""
    rows = random_table(12, 1)
    penal = SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, top_k=20, seed=3)
    alone = [VOCABULARY + n for n in range(12)]
    repeated = torch.cat([rows, rows])
    words = ((5,), (VOCABULARY - 1, 7))
    first, second, third, *plain = generate_with(
        running,
        [
            asked(0, alone, rows, NEW, sampling=penal, bad_words=words),
            asked(1, [token + 12 for token in alone], repeated, NEW, sampling=penal, bad_words=words),
            asked(2, MIXED, rows, NEW, sampling=penal, bad_words=words),
            asked(3, TEXT, None, NEW, sampling=penal, bad_words=words),
            asked(4, TEXT, None, NEW, sampling=penal, bad_words=words),
        ],
    )
    assert (first.error, third.error) == (None, None)
    assert first.tokens == second.tokens
    assert 5 not in (*first.tokens, *third.tokens)
    assert plain[0].tokens == plain[1].tokens
    assert len(first.tokens) == NEW


def test_greedy_penalties_with_rows_are_those_of_transformers(llama: LlamaForCausalLM, running: Engine) -> None:
    """transformers knows only the output of `inputs_embeds`, the engine the prompt's tokens too: none here."""
    rows, prompt = random_table(12, 5), [VOCABULARY + n for n in range(12)]
    with torch.no_grad():
        made = llama.generate(
            inputs_embeds=rows.unsqueeze(0),
            attention_mask=torch.ones(1, 12, dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            repetition_penalty=1.5,
            eos_token_id=None,
            pad_token_id=0,
        )
    own = asked(0, prompt, rows, NEW, sampling=SamplingParams(repetition_penalty=1.5))
    assert answers(running, [own]) == [tuple(made[0].tolist())]


def test_copies_of_a_prompt_share_its_rows(llama: LlamaForCausalLM, running: Engine) -> None:
    rows = random_table(12, 1)
    first = asked("first", MIXED, rows, NEW)
    copies = [replace(first, request_id=f"c{n}", copy_of="first") for n in range(3)]
    made = generate_with(running, [first, *copies])
    assert {each.tokens for each in made} == {embedded_greedy(llama, MIXED, rows, NEW)}


def test_context_logits_have_a_row_for_each_token(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> None:
    engine = take_tables(write_engine(checkpoint, tmp_path / "engine", **SMALL), context_logits=True)
    rows, ranks = random_table(12, 1), KeptRanks(open_engine(engine), 60)
    with Engine(open_engine(engine), ranks, EngineOptions(chunked_context=True)) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, [asked(0, MIXED, rows, 2, context_logits=True)])
    ranks.end()
    with torch.no_grad():
        embedding = llama.get_input_embeddings()
        own = torch.stack([rows[t - VOCABULARY] if t >= VOCABULARY else embedding.weight[t] for t in MIXED])
        logits = llama(inputs_embeds=own.unsqueeze(0)).logits[0]
    found = torch.frombuffer(bytearray(made.context_logits), dtype=torch.float32).view(len(MIXED), VOCABULARY)
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=1e-3)


def test_beams_are_those_of_transformers(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> None:
    engine = take_tables(write_engine(checkpoint, tmp_path / "engine", max_beam_width=3, **SMALL))
    rows, ranks = random_table(12, 9), KeptRanks(open_engine(engine), 120)
    with Engine(open_engine(engine), ranks, EngineOptions(kv_reuse=True, chunked_context=True)) as running:  # type: ignore[arg-type]
        beams = BeamParams(3, 3)
        (made,) = generate_with(running, [asked(0, MIXED, rows, NEW, beams=beams)])
    ranks.end()
    with torch.no_grad():
        embedding = llama.get_input_embeddings()
        own = torch.stack([rows[t - VOCABULARY] if t >= VOCABULARY else embedding.weight[t] for t in MIXED])
        found = llama.generate(
            inputs_embeds=own.unsqueeze(0),
            attention_mask=torch.ones(1, len(MIXED), dtype=torch.long),
            max_new_tokens=NEW,
            num_beams=3,
            num_return_sequences=3,
            length_penalty=0.0,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert [tuple(beam.tokens) for beam in made.beams] == [tuple(row) for row in found.tolist()]


def test_an_adapter_and_a_table_together(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "adapter", 1)
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **SMALL), [adapter])
    rows, source = random_table(12, 1), open_engine(take_tables(engine))
    ranks = KeptRanks(source, 120)
    with Engine(source, ranks, EngineOptions(kv_reuse=True, chunked_context=True)) as running:  # type: ignore[arg-type]
        made = answers(running, [asked(0, MIXED, rows, NEW, lora_task_id=1), asked(1, MIXED, rows, NEW)])
    ranks.end()
    assert made == [embedded_greedy(m, MIXED, rows, NEW) for m in (with_adapter(llama, adapter), llama)]


def test_blocks_in_files_are_found_by_later_engines(llama: LlamaForCausalLM, small: Path, tmp_path: Path) -> None:
    rows, other = random_table(12, 1), random_table(12, 2)
    options = EngineOptions(
        kv_reuse=True, chunked_context=True, kv_cache_tokens=200, kv_store=KvStoreOptions(tmp_path / "store", 1 << 30)
    )
    reused = []
    for _ in range(2):
        with Engine.load(small, options) as running:
            made = [generate_with(running, [asked(0, MIXED, each, NEW)])[0] for each in (rows, other)]
        reused.append([each.reused_blocks for each in made])
        assert [each.tokens for each in made] == [embedded_greedy(llama, MIXED, each, NEW) for each in (rows, other)]
    assert reused == [[0, 1], [len(MIXED) // 4] * 2]


def test_blocks_in_host_memory(llama: LlamaForCausalLM, small: Path) -> None:
    tables = [random_table(12, seed) for seed in range(4)]
    options = EngineOptions(
        kv_reuse=True, chunked_context=True, kv_cache_tokens=64, kv_cache_host_memory_bytes=1 << 20, max_batch_size=1
    )
    with Engine.load(small, options) as running:
        for _ in range(2):
            made = generate_with(running, [asked(n, MIXED, rows, NEW) for n, rows in enumerate(tables)])
            assert [each.tokens for each in made] == [embedded_greedy(llama, MIXED, rows, NEW) for rows in tables]
    assert [each.reused_blocks for each in made] == [len(MIXED) // 4] * 4


def refused(engine: Engine, prompt: list[int], rows: Tensor, **changes: Any) -> Generation:
    request = asked(0, prompt, rows, NEW)
    assert request.prompt_table is not None
    sampling = changes.pop("sampling", SamplingParams())
    table = replace(request.prompt_table, **changes)
    (made,) = generate_with(engine, [replace(request, prompt_table=table, sampling=sampling)])
    return made


@pytest.mark.parametrize(
    ("rows", "changes", "message", "hint"),
    [
        (torch.zeros(12, 60), {}, "prompt_embedding_table has rows of 60 numbers, the model's hidden size is 64", ""),
        (
            torch.zeros(201, 64),
            {},
            "prompt_embedding_table has 201 rows, the limit of this engine is 200 per request",
            "1608",
        ),
        (
            torch.zeros(9, 64),
            {},
            "the prompt has the id 142, beyond the 9 rows of prompt_embedding_table",
            "131 to 139",
        ),
        (torch.full((12, 64), float("nan")), {}, "prompt_embedding_table has numbers that are not finite", "float32"),
        (torch.zeros(12, 64), {"extra_ids": (1, 2)}, "prompt_table_extra_ids has 2 ids, the prompt 29 tokens", ""),
        (torch.zeros(12, 64), {"extra_ids": (-1,) * 29}, "prompt_table_extra_ids has ids beyond 64 bits", ""),
        (torch.zeros(12, 64), {"data": b"1234"}, "prompt_embedding_table has 12 rows and 4 bytes of float32", ""),
        (torch.zeros(12, 64), {"dtype": "int32"}, "prompt_embedding_table cannot be read: KeyError", ""),
        (
            torch.zeros(12, 64),
            {"sampling": SamplingParams(prompt_log_probs=True)},
            "prompt_embedding_table: the prompt has no log probabilities with a prompt table",
            "",
        ),
    ],
)
def test_wrong_tables_are_refused_by_name(
    running: Engine, rows: Tensor, changes: dict[str, Any], message: str, hint: str
) -> None:
    made = refused(running, MIXED, rows, **changes)
    assert made.error is not None
    assert made.error.message.startswith(message)
    assert hint in made.error.hint


def test_prompts_without_rows_and_rows_without_a_table_are_refused(running: Engine) -> None:
    without = refused(running, TEXT, random_table(4, 0)).error
    assert without is not None
    assert without.message == "prompt_embedding_table: the prompt uses none of its rows"
    (made,) = generate_with(running, [asked(0, MIXED, None, NEW)])
    assert made.error is not None
    assert made.error.message == "the prompt holds token ids outside of the vocabulary of 131"


def test_an_engine_that_was_not_compiled_for_tables_names_the_option(engine_directory: Path) -> None:
    with Engine.load(engine_directory, EngineOptions(kv_cache_tokens=100)) as engine:
        made = refused(engine, MIXED, random_table(12, 0))
    assert made.error is not None
    assert made.error.message == "prompt_embedding_table: this engine does not support prompt tables"
    assert "--feature max_prompt_embedding_table_size" in made.error.hint


FEATURES: dict[str, Speculation] = {
    "eagle": EagleFeature(model="eagle", draft_tokens=4),
    "eagle3": Eagle3Feature(model="eagle", draft_tokens=4),
    "medusa": MedusaFeature(model="medusa"),
    "draft": DraftFeature(tokens=3),
    "ngram": NGRAMS,
    "lookahead": LOOKAHEAD,
}


@pytest.mark.parametrize("kind", FEATURES)
def test_drafts_after_rows_change_no_answer(
    llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    """A draft model proposes nothing for a prompt with rows, all others do."""
    engine = take_tables(write_engine(checkpoint, tmp_path / "engine", **SMALL))
    if kind in ("eagle", "eagle3"):
        write_network(engine / "eagle", "eagle" if kind == "eagle" else "eagle3")
    elif kind == "medusa":
        write_heads(engine / "medusa")
    elif kind == "draft":
        write_engine(checkpoint, engine / "draft_engine", **SMALL)
    rows, other = random_table(12, 1), random_table(12, 2)
    alone = [VOCABULARY, VOCABULARY + 3] * 6
    known = [(MIXED, rows), (MIXED, other), (alone, rows), (TEXT, None)]
    options = EngineOptions(
        kv_reuse=True, chunked_context=True, kv_cache_tokens=400, max_num_tokens=24, speculation=FEATURES[kind]
    )
    with Engine.load(engine, options) as running:
        for _ in range(2):
            made = generate_with(running, [asked(n, *each, 30) for n, each in enumerate(known)])
            assert [each.error for each in made] == [None] * 4
            assert running.statistics().kv_blocks_used == 0
            assert [each.tokens for each in made] == [
                greedy(llama, [prompt], 30)[0] if each is None else embedded_greedy(llama, prompt, each, 30)
                for prompt, each in known
            ]
    drafted = [each.drafted_tokens > 0 for each in made]
    if kind == "ngram":  # where something recurs
        assert any(drafted)
    else:
        assert drafted == [kind != "draft"] * 3 + [True]


def test_rows_leave_less_memory_for_blocks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,600 rows of 64 numbers take as much as 100 blocks of 4 tokens, 4 layers, 2 heads of 16 for keys and values."""
    monkeypatch.setattr(kv_capacity, "free_memory", lambda device: 1 << 20)
    blocks = []
    for size in (0, 1600):
        engine = take_tables(write_engine(checkpoint, tmp_path / str(size), **SMALL), size)
        ranks = KeptRanks(open_engine(engine), 8)
        blocks.append(ranks.models[0].blocks_that_fit(1.0, 10_000))
        ranks.end()
    assert blocks == [256, 156]
