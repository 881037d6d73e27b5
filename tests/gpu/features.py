"""Requests for what engines do beside plain decoding, and the engines that they need: a row of FEATURES each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu.engines import INTERPRETED
from tests.runtime.adapters import add_adapters, save_adapter
from tests.runtime.checkpoints import write_checkpoint, write_engine
from tests.runtime.converted import Family
from tests.runtime.eagle_networks import write_network
from tests.runtime.tables import asked as with_table
from tests.runtime.tables import random_table, take_tables
from tests.runtime.test_draft_model import smaller
from tests.runtime.test_eagle import CHOICES
from tests.runtime.test_engine import requests_for
from tests.runtime.test_medusa import right_heads
from trtforge.core.device import UsableDevice
from trtforge.core.features import DraftFeature, EagleFeature, LookaheadFeature, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature, NgramFeature
from trtforge.engine_process.requests import BeamParams, DraftTokens, GenerationRequest, SamplingParams
from trtforge.runtime.engine import EngineOptions
from trtforge.runtime.options import EngineStatistics

VOCABULARY, NEW = 131, 5 if INTERPRETED else 12
LIMITS = {"tokens_per_block": 8, "max_num_tokens": 256, "max_input_len": 160}
CHUNKED = EngineOptions(chunked_context=True)
PAUSING = EngineOptions(chunked_context=True, scheduler="max_utilization", kv_cache_tokens=160)
SAMPLED = SamplingParams(top_k=20, top_p=0.9, temperature=1.5, seed=5)
ALL_LOG_PROBS = {"return_log_probs": True, "prompt_log_probs": True, "top_log_probs": 3}
_FIRST = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (2,))
TREE = (*_FIRST, (1, 0), (1, 1), (1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 0, 2, 0), (1, 0, 2, 1))
RIGHT = (1, 0, 2, 1)
"""The ranks that Medusa heads give the right tokens; TREE has the path, its nodes behind others'."""

Rounds = list[list[GenerationRequest]]


def numbers(length: int, seed: int = 0) -> list[int]:
    """Tokens of a prompt."""
    made: list[int] = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


def prompts(*lengths: int) -> list[list[int]]:
    return [numbers(length, seed) for seed, length in enumerate(lengths)]


MIXED = prompts(5, 17, 40, 1, 33, 90)
REPEATED = [numbers(7, seed) * 4 for seed in range(3)]


def plain() -> Rounds:
    """Prompts of many lengths at once; then one after another the same, which blocks or graphs may serve, and longer
    ones, of which a few tokens are new."""
    again = [requests_for([MIXED[index]], NEW) for index in (2, 4, 2)]
    return [requests_for(MIXED, NEW), *again, requests_for([[*MIXED[5], *numbers(3, 9)], MIXED[1]], NEW)]


def at_once() -> Rounds:
    return [requests_for(MIXED, NEW)]


def drafted() -> Rounds:
    """Greedy and sampled requests whose texts repeat and do not, then a prefix again."""
    sampled = requests_for(MIXED[:2], NEW, sampling=SAMPLED)
    return [[*requests_for([*REPEATED, *MIXED[1:3]], 2 * NEW), *sampled], requests_for(REPEATED[:1], NEW)]


def chunks_beside_answers() -> Rounds:
    """Prompts of several chunks while other requests run."""
    return [[*requests_for(MIXED[:4], 3 * NEW), *requests_for([numbers(150, 7), numbers(101, 8)], NEW)]]


def growing() -> Rounds:
    """Answers that together need more blocks than PAUSING has."""
    return [requests_for(MIXED[:4], 36)]


def sampled() -> Rounds:
    """A batch in which each request has other parameters; the last ones are copies of an earlier prompt."""
    bias = [0.0] * VOCABULARY
    bias[7], bias[50] = 3.0, -20.0
    drawn = SamplingParams(temperature=1.3, top_p=1.0)
    params = [
        SamplingParams(repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.5),
        SamplingParams(embedding_bias=bias),
        SamplingParams(no_repeat_ngram_size=2),
        SamplingParams(repetition_penalty=1.3, prompt_ignore_length=3),
        replace(drawn, top_k=5),
        replace(drawn, top_k=40, top_p=0.8),
        replace(drawn, top_p=0.7),
        replace(drawn, min_p=0.2),
        replace(drawn, min_p=0.05, top_k=30, top_p=0.95),
        replace(drawn, top_p=0.9, top_p_decay=0.8, top_p_min=0.1),
        replace(drawn, frequency_penalty=0.4, embedding_bias=bias),
        drawn,
    ]
    asked = [
        *(request(at, replace(each, seed=at)) for at, each in enumerate(params)),
        request(3, SamplingParams(min_tokens=6), end_ids=frozenset(range(60))),
        request(4, replace(drawn, seed=3), end_ids=frozenset(range(20)), stop_words=((30,), (31, 32))),
        request(5, SamplingParams(), bad_words=(*((token,) for token in range(40, 90)), (1, 2))),
        request(2, drawn, drafts=draft(5)),
        request(4, replace(drawn, seed=7), drafts=draft(6)),
    ]
    copied = [replace(asked[6], copy_of="6", sampling=replace(params[6], seed=seed)) for seed in (40, 41)]
    return [[*asked, *copied]]


def request(at: int, sampling: SamplingParams, **changes: Any) -> GenerationRequest:
    return GenerationRequest("", tuple(MIXED[at % len(MIXED)]), NEW, sampling, **changes)


def draft(count: int) -> DraftTokens:
    """Tokens that were drawn from other logits than the engine's."""
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(count))
    return DraftTokens(tuple(logits.argmax(dim=1).tolist()), logits.numpy().tobytes())


def scored() -> Rounds:
    """Log probabilities and logits of prompts and answers, greedy and sampled, of chunks and of a prefix again."""
    wanted = {"context_logits": True, "generation_logits": True}
    greedy = requests_for(MIXED, NEW, sampling=SamplingParams(**ALL_LOG_PROBS), **wanted)
    return [greedy, requests_for(MIXED[:3], NEW, sampling=replace(SAMPLED, **ALL_LOG_PROBS), **wanted)]


def searched() -> Rounds:
    searches = [
        (BeamParams(4, 4, length_penalty=1.0), {}),
        (BeamParams(3, 2, early_stopping=False), {"end_ids": frozenset(range(30))}),
        (BeamParams(4, 4, diversity_rate=0.5), {"sampling": SamplingParams(temperature=0.7, repetition_penalty=1.2)}),
        (BeamParams(2, 2), {"sampling": SamplingParams(return_log_probs=True, no_repeat_ngram_size=2)}),
    ]
    found = [
        replace(request(at + 1, SamplingParams()), beams=beams, **more) for at, (beams, more) in enumerate(searches)
    ]
    return [[*found, request(0, SamplingParams())]]


def evicted() -> Rounds:
    """Prompts that do not fit beside one another, again and again."""
    rounds = requests_for(prompts(60, 50, 70, 60), NEW)
    return [[each] for each in [*rounds, *rounds[:3]]]


def adapted() -> Rounds:
    """Requests of all adapters, and of none, beside one another; later fewer adapters, on rows of other slots."""
    tasks = (1, 2, 3, None, 2, 1)
    asked = [replace(each, lora_task_id=task) for each, task in zip(requests_for(MIXED, NEW), tasks, strict=True)]
    return [asked, asked[2:5], [replace(each, sampling=SAMPLED) for each in asked[:3]]]


def tabled() -> Rounds:
    """Prompts with rows of prompt tables before, among and after their tokens, beside prompts without any."""
    rows = random_table(6, seed=2)
    virtual = [VOCABULARY + at for at in range(len(rows))]
    mixed = [[*virtual, *MIXED[0]], [*MIXED[1], *virtual[:3], *MIXED[3], virtual[5]], virtual]
    return [[*(with_table("", prompt, rows, NEW) for prompt in mixed), *requests_for(MIXED[:2], NEW)]]


@dataclass(frozen=True)
class Feature:
    """Requests in `rounds`, one after another on one engine, or `reopened`: each round on an engine of its own.

    `family`: of the model, with other `config` values. `add`: puts parts beside the engine. `used`: whether the feature
    took part, by the statistics at the end of each round.
    """

    rounds: Callable[[], Rounds]
    family: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    options: EngineOptions = CHUNKED
    limits: Mapping[str, int] = field(default_factory=dict)
    add: Callable[[Path, Family, UsableDevice], object] = lambda engine, family, device: None
    used: Callable[[Sequence[EngineStatistics]], bool] = lambda found: True
    reopened: bool = False
    stores: bool = False


def speculating(feature: Any) -> EngineOptions:
    return replace(CHUNKED, speculation=feature)


def add_heads(engine: Path, family: Family, device: UsableDevice) -> None:
    """Medusa heads that know the answer to the first prompt."""
    prompt = REPEATED[0]
    ids = torch.tensor([prompt])
    answer = family.model.generate(ids, max_new_tokens=2 * NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    right_heads(family.model, prompt, tuple(answer[0, len(prompt) :].tolist()), engine / "medusa", ranks=RIGHT)


def add_adapters_of(engine: Path, family: Family, device: UsableDevice) -> None:
    kinds: list[dict[str, Any]] = [{}, {"target_modules": ["q_proj", "v_proj"]}, {"r": 2, "use_rslora": True}]
    paths = [save_adapter(family.model, engine.parent / f"a{n}", n, **kind) for n, kind in enumerate(kinds)]
    add_adapters(engine, paths)


def add_draft_engine(engine: Path, family: Family, device: UsableDevice) -> None:
    limits = {"max_input_len": 160, "max_seq_len": 192, "max_num_tokens": 256, "tokens_per_block": 8}
    draft = write_checkpoint(smaller(family.model, 3), engine.parent / "draft")  # type: ignore[arg-type]
    write_engine(draft, engine / "draft_engine", device=device, **limits)


def add_logits(engine: Path, family: Family, device: UsableDevice) -> None:
    take_tables(engine, 0, context_logits=True, generation_logits=True)


def has_drafted(found: Sequence[EngineStatistics]) -> bool:
    return found[-1].drafted_tokens > 0


def has_accepted(found: Sequence[EngineStatistics]) -> bool:
    return found[-1].accepted_tokens > 0


def has_reused(found: Sequence[EngineStatistics]) -> bool:
    return found[-1].kv_blocks_reused > 0


LARGE_LATENT = {"kv_lora_rank": 260}
"""Latent vectors that no kernel takes: blocks are gathered."""
FEATURES: dict[str, Feature] = {
    "graphs of prompts": Feature(plain, options=EngineOptions(kv_reuse=False)),
    "mixture of experts": Feature(plain, "mixtral", used=has_reused),
    "shared expert": Feature(at_once, "qwen2_moe"),
    "sinks and clamped experts": Feature(plain, "gpt_oss", limits={"max_batch_size": 2}),
    "latent attention": Feature(plain, "deepseek_v2", used=has_reused),
    "large latent vectors": Feature(plain, "deepseek_v2_lite", LARGE_LATENT, used=has_reused),
    "sigmoid routing": Feature(at_once, "deepseek_v3"),
    "linear attention": Feature(plain, "qwen3_next"),
    "linear attention with drafts": Feature(
        drafted, "qwen3_next", options=speculating(NgramFeature(draft_tokens=4, matching=1)), used=has_drafted
    ),
    "attention in chunks": Feature(plain, "llama4"),
    "sliding windows": Feature(plain, "mistral"),
    "windows with blocks of their own": Feature(
        plain,
        "gemma2",
        limits={"max_batch_size": 2, "max_num_tokens": 96},
        used=lambda f: f[0].kv_window_blocks_max > 0,
    ),
    "graphs of prompts with windows": Feature(
        plain, "gemma3", options=EngineOptions(kv_reuse=False), limits={"max_batch_size": 2, "max_num_tokens": 96}
    ),
    "alibi": Feature(plain, "bloom"),
    "chunks beside answers": Feature(chunks_beside_answers, limits={"max_num_tokens": 32}),
    "pauses": Feature(growing, options=PAUSING, used=lambda found: found[-1].paused_requests > 0),
    "n-grams": Feature(drafted, options=speculating(NgramFeature(draft_tokens=5, matching=3)), used=has_accepted),
    "lookahead": Feature(drafted, options=speculating(LookaheadFeature()), used=has_drafted),
    "medusa": Feature(drafted, options=speculating(MedusaFeature()), add=add_heads, used=has_drafted),
    "medusa tree": Feature(drafted, options=speculating(MedusaFeature(choices=TREE)), add=add_heads, used=has_accepted),
    "eagle": Feature(
        drafted,
        options=speculating(EagleFeature(model="eagle", draft_tokens=4)),
        add=lambda engine, family, device: write_network(engine / "eagle", "eagle"),
        used=has_drafted,
    ),
    "eagle tree": Feature(
        drafted,
        options=speculating(EagleFeature(model="eagle", choices=CHOICES)),
        add=lambda engine, family, device: write_network(engine / "eagle", "eagle"),
        used=has_drafted,
    ),
    "eagle-3": Feature(
        drafted,
        options=speculating(Eagle3Feature(model="eagle", draft_tokens=4)),
        add=lambda engine, family, device: write_network(engine / "eagle", "eagle3"),
        used=has_drafted,
    ),
    "draft model": Feature(
        drafted, options=speculating(DraftFeature(tokens=3)), add=add_draft_engine, used=has_drafted
    ),
    "adapters": Feature(adapted, add=add_adapters_of),
    "prompt tables": Feature(tabled, add=lambda engine, family, device: take_tables(engine)),
    "sampling": Feature(sampled, limits={"max_batch_size": 20}),
    "log probabilities and logits": Feature(scored, limits={"max_num_tokens": 64}, add=add_logits),
    "beams": Feature(searched, limits={"max_beam_width": 4, "max_batch_size": 16}),
    "host memory": Feature(
        evicted,
        options=EngineOptions(kv_cache_tokens=96, kv_cache_host_memory_bytes=1 << 22),
        used=lambda found: found[-1].kv_host_blocks_onboarded > 0,
    ),
    "files": Feature(evicted, options=EngineOptions(kv_cache_tokens=96), stores=True, reopened=True, used=has_reused),
}
