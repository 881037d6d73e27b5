"""Every family: the ranks that the project's own converter writes compute what transformers does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.families import MIXTURES, TINY
from tests.runtime.checkpoints import write_engine
from tests.runtime.conftest import greedy
from tests.runtime.converted import LONG, TOKENS, Families, computed, edited, error
from tests.runtime.runner import open_runner
from tests.runtime.test_engine import requests_for
from tests.runtime.test_lookahead import LOOKAHEAD
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import BeamParams, GenerationRequest, SamplingParams
from trtforge.formats.attention_windows import window_blocks_for
from trtforge.runtime.drafting import Drafter, NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.lookahead import LookaheadDrafter
from trtforge.runtime.ranks.source import open_engine, open_model
from trtforge.runtime.scheduling.batch import Step

TOLERANCE, NEW = 1e-4, 8
ODD = ("bloom", "gemma2", "gemma3", "mistral", "deepseek_v2", "qwen2_moe", "gpt_oss")
"""ALiBi, capped scores, windows, latent attention, experts, sinks."""
_BEGUN = [3 + index * 7 % 120 for index in range(40)]
LONG_PROMPTS = [_BEGUN, [*_BEGUN, 5, 9], _BEGUN[:3], [*_BEGUN[:20], *_BEGUN[:15]]]
"""Prompts that reach beyond the windows, or whose answers do."""


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2}], ids=["tp1", "tp2pp2"])
@pytest.mark.parametrize("name", TINY)
def test_the_logits_are_those_of_transformers(families: Families, name: str, layout: dict[str, int]) -> None:
    family = families(name)
    made = computed(family.checkpoint(**layout), TOKENS, LONG)
    assert error(made[0], family.logits(TOKENS)) < TOLERANCE
    assert error(made[1], family.logits(LONG)) < TOLERANCE


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}], ids=["tp2ep2", "tp4ep2"])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_may_be_spread_over_ranks(families: Families, name: str, layout: dict[str, int]) -> None:
    family = families(name)
    assert error(computed(family.checkpoint(**layout), TOKENS)[0], family.logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["gpt_bigcode", "starcoder2", "falcon_7b", "falcon_40b", "phi3", "qwen3", "cohere_qk_norm"]
)
def test_ranks_that_outnumber_kv_heads_share_them(families: Families, name: str) -> None:
    family = families(name)
    assert error(computed(family.checkpoint(tp=4), TOKENS)[0], family.logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "cohere", "gemma", "opt"])
def test_embeddings_may_be_split(families: Families, name: str, dim: int) -> None:
    family = families(name)
    checkpoint = family.checkpoint(tp=2, parallel_embedding=True, embedding_sharding_dim=dim)
    assert error(computed(checkpoint, TOKENS)[0], family.logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", TINY)
def test_a_sequence_in_pieces_gives_the_same_logits(
    families: Families, name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context chunks, then single tokens: the cache holds what a whole sequence is computed with."""
    monkeypatch.setenv("TRTFORGE_KERNELS", kernels)
    family = families(name)
    size, ends = 32, [23, 24, 37, 50, *range(51, 58)]
    ranks = ThreadRanks(open_model(family.checkpoint()), 2)
    parts, start = [], 0
    for end in ends:
        count = np.array([end - start])
        table, tokens = np.arange(-(-end // size)).reshape(1, -1), np.array(LONG[start:end])
        logits = ranks.execute(Step(np.array([start]), count, count, table, tokens, length=ends[-1]))
        assert logits is not None
        parts.append(logits)
        start = end
    ranks.close()
    assert error(torch.cat(parts), family.logits(LONG[: ends[-1]])) < TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_an_engine_computes_what_its_checkpoint_does(families: Families, name: str, tmp_path: Path) -> None:
    family = families(name)
    engine = write_engine(family.checkpoint(), tmp_path / "engine")
    assert error(computed(engine, TOKENS)[0], family.logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize("name", [*ODD, "qwen3_next"])
def test_requests_in_flight_get_the_tokens_of_transformers(
    families: Families, name: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    family = families(name)
    made = generate(write_engine(family.checkpoint(), tmp_path / "engine"), requests_for(prompts[:5]))
    assert [generation.tokens for generation in made] == greedy(family.model, prompts[:5], 24)


@pytest.mark.parametrize(
    "name", [*(name for name in TINY if name != "phi3_longrope"), *(f"{name} split" for name in (*ODD, "qwen3_next"))]
)
def test_no_schedule_changes_greedy_tokens(
    families: Families, name: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Prompts in chunks, prefixes reused, requests paused, drafts verified, steps begun ahead of the tokens of those
    before: the tokens are those of transformers.

    But for longrope: its factors depend on a sequence's whole length, which an engine cannot know before its end.
    """
    name, split = name.removesuffix(" split"), name.endswith(" split")
    family, layout = families(name), {"tp": 2, "pp": 2} if split else {}
    begun = [3 + token % 120 for token in prompts[1][:9]]
    asked = [[*begun, 5], [*begun, 7, 5, 7, 5], [*begun, *begun, *begun], [11]]
    expected = greedy(family.model, asked, NEW)
    source = open_engine(
        write_engine(family.checkpoint(**layout), tmp_path / "engine", tokens_per_block=4, max_num_tokens=16)
    )
    ranks = KeptRanks(source, 14)

    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.integers(0, 3), min_size=2, max_size=4),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        drafts=st.sampled_from(["none", "ahead", "ngram", "lookahead"]),
    )
    @example(chosen=[0, 2, 3], policy="guaranteed_no_evict", reuse=True, drafts="lookahead")
    @example(chosen=[2, 0, 3], policy="max_utilization", reuse=True, drafts="ahead")
    def check(chosen: list[int], policy: SchedulerPolicy, reuse: bool, drafts: str) -> None:
        ranks.computes_ahead = drafts == "ahead" and not split
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True)
        drafters: dict[str, Drafter] = {"ngram": NgramDrafter(NGRAMS), "lookahead": LookaheadDrafter(LOOKAHEAD)}
        with Engine(source, ranks, options, drafters.get(drafts)) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, requests_for([asked[index] for index in chosen], NEW))
        assert [generation.tokens for generation in made] == [expected[index] for index in chosen]

    check()
    ranks.end()


@pytest.mark.parametrize(
    ("name", "native"), [("mistral", True), ("mistral", False), ("phi3", True), ("mistral split", True)]
)
def test_blocks_behind_the_windows_are_freed_while_tokens_stay_those_of_transformers(
    families: Families, name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of up to 75 tokens with a window of 16: 19 blocks of 4, of which 5 are held, in a cache of 14.

    Requests with the same prompt are copies of the first; a beam search, which keeps all its blocks, runs beside them.
    """
    if not native:
        monkeypatch.setenv("TRTFORGE_KERNELS", "torch")
    name, split = name.removesuffix(" split"), name.endswith(" split")
    family, layout = families(name), {"tp": 2, "pp": 2} if split else {}
    expected = greedy(family.model, LONG_PROMPTS, 33)
    source = open_engine(
        write_engine(
            family.checkpoint(**layout), tmp_path / "engine", tokens_per_block=4, max_num_tokens=16, max_beam_width=2
        )
    )
    search = GenerationRequest("", tuple(_BEGUN[:5]), 8, beams=BeamParams(2, 2))
    ranks = KeptRanks(source, 14)

    @settings(max_examples=2 if split else 5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.integers(0, 3), min_size=2, max_size=5),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        drafts=st.booleans(),
        copies=st.booleans(),
    )
    def check(chosen: list[int], policy: SchedulerPolicy, reuse: bool, drafts: bool, copies: bool) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True)
        drafter = NgramDrafter(NGRAMS) if drafts else None
        requests = requests_for([LONG_PROMPTS[index] for index in chosen], 33)
        if copies:
            first = {index: str(chosen.index(index)) for index in chosen}
            requests = [
                replace(each, copy_of=None if first[index] == each.request_id else first[index])
                for each, index in zip(requests, chosen, strict=True)
            ]
        with Engine(source, ranks, options, drafter) as engine:  # type: ignore[arg-type]
            *made, searched = generate_with(engine, [*requests, search])
            assert engine.statistics().kv_blocks_used == 0
        assert [generation.tokens for generation in made] == [expected[index] for index in chosen]
        assert (searched.error, len(searched.beams)) == (None, 2)

    check()
    ranks.end()


@pytest.mark.parametrize(
    ("name", "native"),
    [
        *(
            (name, True)
            for name in ("gemma2", "gemma3", "qwen2_window", "gpt_oss", "gemma3 split", "qwen2_window split")
        ),
        ("gemma3", False),
    ],
)
def test_layers_with_windows_keep_blocks_of_their_own_while_tokens_stay_those_of_transformers(
    families: Families, name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of up to 75 tokens, 19 blocks of 4, of which layers with a window of 16 hold 7 at most."""
    if not native:
        monkeypatch.setenv("TRTFORGE_KERNELS", "torch")
    name, split = name.removesuffix(" split"), name.endswith(" split")
    family, layout = families(name), {"tp": 2, "pp": 2} if split else {}
    expected = greedy(family.model, LONG_PROMPTS, 33)
    limits = {"tokens_per_block": 4, "max_num_tokens": 16, "max_batch_size": 4, "max_beam_width": 2}
    source = open_engine(write_engine(family.checkpoint(**layout), tmp_path / "engine", **limits))
    search = GenerationRequest("", tuple(_BEGUN[:5]), 30, beams=BeamParams(2, 2))
    ranks, together = KeptRanks(source, 60, 0), KeptRanks(source, 60, 0, window_blocks_for(16, 4, 4, 16))
    with Engine(source, ranks, EngineOptions(chunked_context=True)) as engine:  # type: ignore[arg-type]
        (beams,) = generate_with(engine, [search])

    @settings(max_examples=2 if split else 5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.integers(0, 3), min_size=2, max_size=5),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        drafts=st.booleans(),
    )
    def check(chosen: list[int], policy: SchedulerPolicy, reuse: bool, drafts: bool) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True)
        drafter, used = NgramDrafter(NGRAMS) if drafts else None, [0]
        requests = requests_for([LONG_PROMPTS[index] for index in chosen], 33)
        with Engine(source, together, options, drafter) as engine:  # type: ignore[arg-type]
            engine.after_steps(lambda: used.append(engine.statistics().kv_window_blocks_used))
            *made, searched = generate_with(engine, [*requests, search])
            figures = engine.statistics()
        assert [generation.tokens for generation in made] == [expected[index] for index in chosen]
        assert [each.tokens for each in searched.beams] == [each.tokens for each in beams.beams]
        assert (figures.kv_blocks_used, figures.kv_window_blocks_used, figures.kv_window_blocks_max) == (0, 0, 32)
        assert 0 < max(used) <= 32

    check()
    ranks.end()
    together.end()


@pytest.mark.parametrize("name", ODD)
def test_bfloat16_stays_near(families: Families, name: str, tmp_path: Path) -> None:
    """As near as transformers' own bfloat16; where rounding chooses another expert, a few tokens' logits are far."""
    family = families(name)
    engine = write_engine(family.checkpoint(), tmp_path / "engine", dtype="bfloat16")
    made, reference = computed(engine, TOKENS)[0], family.logits(TOKENS)
    errors = (made - reference).norm(dim=1) / reference.norm(dim=1)
    assert float(errors.median()) < 0.03
    assert int((errors > 0.1).sum()) <= (len(errors) // 10 if name in MIXTURES else 0)


@pytest.mark.parametrize("name", ["bloom", "gemma2", "deepseek_v2"])
def test_an_fp8_cache_stays_near(families: Families, name: str, tmp_path: Path) -> None:
    checkpoint = families(name).checkpoint()
    tensors = load_file(checkpoint / "rank0.safetensors")
    scales = {
        f"transformer.layers.{layer}.attention.kv_cache_scaling_factor": torch.tensor([0.02]) for layer in range(4)
    }
    values = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization": {"kv_cache_quant_algo": "FP8"}}))
    save_file(tensors | scales, tmp_path / "rank0.safetensors")
    made, reference = computed(tmp_path, TOKENS)[0], families(name).logits(TOKENS)
    assert 1e-4 < float((made - reference).norm() / reference.norm()) < 0.2


def test_ranks_are_processes(families: Families) -> None:
    family = families("mixtral")
    with open_runner(family.checkpoint(tp=2, ep=2)) as runner:
        assert error(runner.logits(TOKENS), family.logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2_window", {"sliding_window_layers": None}),
        ("gemma2", {"sliding_window": 17}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 24}),
        ("gemma3", {"rope_local_base_freq": None}),
        ("gemma3", {"rotary_scaling": None}),
        ("granite", {"attention_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"output_multiplier_scale": 1.0}),
        ("phi3_longrope", {"longrope_scaling_long_factors": [1.0] * 6}),
        ("llama4", {"attention_chunk_size": 17}),
        ("llama4", {"attn_temperature_tuning": False}),
        ("llama4", {"floor_scale": 9.0}),
        ("llama4", {"nope_layers": [3]}),
        ("llama4", {"qk_l2_norm": False}),
        ("llama4", {"scoring_func": None}),
        ("gpt_oss", {"swiglu_limit": 6.0}),
        ("gpt_oss", {"swiglu_alpha": 1.0}),
        ("gpt_oss", {"sliding_window": 17}),
        ("gpt_oss", {"rotary_scaling": None}),
        ("gpt_neox", {"rotary_pct": 0.5}),
        ("gptj", {"rotary_dim": 4}),
        ("gptj", {"position_embedding_type": "rope_gpt_neox"}),
        ("nemotron", {"rotary_pct": 1.0}),
        ("falcon_rw", {"position_embedding_type": "alibi"}),
        ("deepseek_v2", {"rotary_scaling": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_config_json_says_matters(families: Families, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The tolerance tells right from wrong: each of these, wrong, is seen."""
    family = families(name)
    directory = edited(family.checkpoint(), tmp_path, changes)
    assert error(computed(directory, LONG)[0], family.logits(LONG)) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_rows_that_pad_a_static_batch_do_not_change_cached_blocks(
    families: Families, name: str, tmp_path: Path
) -> None:
    """A finished row's last token is computed again and fills a block, which the second batch reuses; it attends to one
    token more than the next token would have, the last one of a block of 5."""
    family = families(name)
    engine = write_engine(family.checkpoint(), tmp_path / "engine", tokens_per_block=5, max_num_tokens=64)
    options = EngineOptions(batching="static_padded", chunked_context=True, kv_cache_tokens=500)
    short, longer = requests_for([TOKENS[:24], TOKENS[30:37]], 2)
    with Engine.load(engine, options) as running:
        first, _ = generate_with(running, [short, replace(longer, max_tokens=20)])
        (asked,) = requests_for([[*TOKENS[:24], first.tokens[0], 7]], 8, sampling=SamplingParams(return_log_probs=True))
        (again,) = generate_with(running, [asked])
    (alone,) = generate(engine, [asked])
    assert (again.reused_blocks, again.tokens) == (5, alone.tokens)
    assert again.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
