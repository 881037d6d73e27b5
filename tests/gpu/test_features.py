"""What engines do beside plain decoding: requests on the GPU get what the same engine gives them on the CPU.

All in float32, but for the logits of families in half precision.
"""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.families import TINY
from tests.gpu.engines import DEVICE, computing_on_device, is_as_near_as_the_cpu
from tests.gpu.features import CHUNKED, FEATURES, LIMITS, MIXED, NEW, SAMPLED, VOCABULARY, Rounds, numbers
from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import Families, Family
from tests.runtime.test_context_phase import handed_on
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.test_guidance import mixed
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import Output
from trtforge.runtime.client_drafts import Drafts
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate_with
from trtforge.runtime.kv_store import KvStoreOptions
from trtforge.runtime.options import EngineStatistics
from trtforge.runtime.scheduling.sequence import Sequence as Running

pytestmark = pytest.mark.gpu


@dataclass
class Answers:
    """What an engine answered, its statistics after each round, and what it drafted after which tokens."""

    made: list[Generation] = field(default_factory=list)
    statistics: list[EngineStatistics] = field(default_factory=list)
    drafts: dict[Tokens, Tokens] = field(default_factory=dict)


def answers_of(directory: Path, rounds: Rounds, options: EngineOptions, *, reopened: bool = False) -> Answers:
    found, propose = Answers(), Drafts.draft

    def noted(self: Drafts, running: Sequence[Running]) -> None:
        propose(self, running)
        for each in running:
            if each.draft.tokens and each.tokens[-1] >= 0:
                found.drafts[tuple(each.tokens)] = each.draft.tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafts, "draft", noted)
        for each in [[one] for one in rounds] if reopened else [rounds]:
            with Engine.load(directory, options) as engine:
                for requests in each:
                    found.made += generate_with(engine, requests)
                    found.statistics.append(engine.statistics())
    return found


def require_same(found: Answers, expected: Answers) -> None:
    """Equal tokens, nearly equal numbers, and the same drafts but for those of equally likely tokens."""
    assert [each.error for each in expected.made] == [None] * len(expected.made)
    for at, (made, wanted) in enumerate(zip(found.made, expected.made, strict=True)):
        assert made.error is None, (at, made.error)
        assert (made.tokens, made.finish_reason) == (wanted.tokens, wanted.finish_reason), at
        assert made.log_probs == pytest.approx(wanted.log_probs, abs=2e-3)
        assert [[token for token, _ in top] for top in made.top_log_probs] == [
            [token for token, _ in top] for top in wanted.top_log_probs
        ]
        if wanted.prompt_log_probs is not None:
            assert made.prompt_log_probs is not None
            assert made.prompt_log_probs.values == pytest.approx(wanted.prompt_log_probs.values, abs=2e-3)
        for own, other in (
            (made.context_logits, wanted.context_logits),
            (made.generation_logits, wanted.generation_logits),
        ):
            rows = np.frombuffer(own, np.float32), np.frombuffer(other, np.float32)
            np.testing.assert_allclose(*rows, rtol=1e-3, atol=2e-3)
        assert [beam.tokens for beam in made.beams] == [beam.tokens for beam in wanted.beams], at
        scores = [beam.cumulative_log_prob for beam in wanted.beams]
        assert [beam.cumulative_log_prob for beam in made.beams] == pytest.approx(scores, abs=5e-3)
    assert [each.kv_blocks_used for each in found.statistics] == [0] * len(found.statistics)
    shared = found.drafts.keys() & expected.drafts.keys()
    assert len(shared) >= 0.9 * len(expected.drafts)
    assert sum(found.drafts[tokens] != expected.drafts[tokens] for tokens in shared) <= 0.1 * len(shared)


@pytest.mark.parametrize("name", FEATURES)
def test_requests_get_what_the_cpu_gives_them(name: str, families: Families, tmp_path: Path) -> None:
    feature = FEATURES[name]
    family = families(feature.family)
    if feature.config:
        family = Family(TINY[feature.family](**feature.config), tmp_path / "family")
        family.directory.mkdir()
    rounds, options = feature.rounds(), feature.options

    def answered(place: Path, device: UsableDevice) -> Answers:
        place.mkdir()
        engine = write_engine(family.checkpoint(), place / "engine", device=device, **{**LIMITS, **feature.limits})
        feature.add(engine, family, device)
        own = replace(options, kv_store=KvStoreOptions(place / "store")) if feature.stores else options
        return answers_of(engine, rounds, own, reopened=feature.reopened)

    expected = answered(tmp_path / "reference", "cpu")
    with computing_on_device():
        found = answered(tmp_path / "candidate", DEVICE)
    require_same(found, expected)
    assert feature.used(expected.statistics)
    assert feature.used(found.statistics)


def test_an_engine_goes_on_with_prompts_of_another_one(families: Families, tmp_path: Path) -> None:
    """Context and generation on engines of their own, with their KV blocks in the same files."""
    checkpoint = families("llama").checkpoint()
    requests = [*requests_for(MIXED, NEW), *requests_for(MIXED[:3], NEW, sampling=SAMPLED)]
    expected = answers_of(write_engine(checkpoint, tmp_path / "reference", **LIMITS), [requests], CHUNKED)
    engine = write_engine(checkpoint, tmp_path / "candidate", device=DEVICE, **LIMITS)
    options = EngineOptions(kv_store=KvStoreOptions(tmp_path / "store"), chunked_context=True)
    with computing_on_device(), Engine.load(engine, options) as context, Engine.load(engine, options) as generation:
        made = handed_on((context, generation), requests)
    assert [each.tokens for each in made] == [each.tokens for each in expected.made]
    assert [each.reused_blocks for each in made[: len(MIXED)]] == [len(prompt) // 8 for prompt in MIXED]


def test_guides_allow_the_same_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Schemas beside requests without one, greedy and sampled, on the demo model."""
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, tmp_path / "checkpoint").path
    requests = [replace(each, max_tokens=30) for each in mixed(tokenizer, 9)]

    def answered(out: Path, device: UsableDevice) -> Answers:
        config = EngineConfig(backend="torch", device=device, compute_dtype="float32", max_seq_len=256)
        return answers_of(compile_engine(config, checkpoint, out).path, [requests], CHUNKED)

    expected = answered(tmp_path / "reference", "cpu")
    with computing_on_device():
        require_same(answered(tmp_path / "candidate", DEVICE), expected)


def test_a_cancelled_request_disturbs_no_other_one(families: Families, tmp_path: Path) -> None:
    """One while it answers, one while its prompt is computed, one while it waits."""
    checkpoint = families("llama").checkpoint()
    requests = [
        replace(each, request_id=str(at)) for at, each in enumerate(requests_for([*MIXED, numbers(150)], 4 * NEW))
    ]
    limits = LIMITS | {"max_batch_size": 4, "max_num_tokens": 64}
    expected = answers_of(write_engine(checkpoint, tmp_path / "reference", **limits), [requests], CHUNKED).made
    candidate = write_engine(checkpoint, tmp_path / "candidate", device=DEVICE, **limits)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    answers: dict[str, list[int]] = {each.request_id: [] for each in requests}
    reasons: dict[str, str] = {}
    with computing_on_device(), Engine.load(candidate, CHUNKED) as engine:

        def receive(output: Output) -> None:
            if output.request_id == "0" and len(answers["0"]) == 0:
                for request_id in ("1", "3", "6"):
                    engine.cancel(request_id)
            answers[output.request_id].extend(output.tokens)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
                outputs.put(output)

        engine.submit(*((each, receive) for each in requests))
        for _ in requests:
            outputs.get(timeout=PATIENCE)
        assert engine.statistics().kv_blocks_used == 0
    assert reasons == {name: "cancelled" if name in ("1", "3", "6") else "length" for name in answers}
    for name, wanted in zip(answers, expected, strict=True):
        made = tuple(answers[name])
        assert made == wanted.tokens[: len(made)]
        assert len(made) == len(wanted.tokens) or reasons[name] == "cancelled"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "gemma2", "llama4", "bloom", "cohere"]
)
def test_families_in_half_precision(name: str, dtype: ModelDtype, families: Families, tmp_path: Path) -> None:
    """Where rounding chooses other experts, the GPU may choose those of other tokens than the CPU."""
    assert is_as_near_as_the_cpu(families(name).checkpoint(), tmp_path / "gpu", dtype, vocabulary=VOCABULARY, most=3.0)
