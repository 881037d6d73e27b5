"""Engines with and without a screened LM head give the same answers to any mix of requests, under any schedule."""

import queue
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.adapters import add_adapters, save_adapter
from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.eagle_networks import write_network
from tests.runtime.test_draft_model import smaller
from tests.runtime.test_lookahead import LOOKAHEAD
from tests.runtime.test_medusa import write_heads
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.features import DraftFeature, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Output, SamplingParams
from trtforge.models import kernels as kernel_choice
from trtforge.runtime.decoder.logits import Head
from trtforge.runtime.drafters import open_drafter, with_drafter
from trtforge.runtime.drafting import Speculation
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.ranks.engine_adapters import taking_adapters
from trtforge.runtime.ranks.source import Source, open_engine

VOCAB, ADAPTERS = 6144, 2
CASES: dict[str, tuple[Layout, Speculation | None]] = {
    "lora": (Layout(), None),
    "tp4": (Layout(tp=4), NGRAMS),
    "pp2": (Layout(pp=2), NGRAMS),
    "tp2pp2": (Layout(tp=2, pp=2), LOOKAHEAD),
    "medusa": (Layout(), MedusaFeature()),
    "eagle3": (Layout(), Eagle3Feature(model="eagle", draft_tokens=3)),
    "draft": (Layout(), DraftFeature(tokens=3)),
}
"""Layout, and how an engine drafts. All have adapters but the one with a network."""


@dataclass
class Pair:
    """One engine's ranks, without and with a screen of the head."""

    source: Source
    ranks: list[KeptRanks]
    feature: Speculation | None
    screens: list[int] = field(default_factory=list)

    def answers(self, screened: bool, options: EngineOptions, asked: list[tuple[int, GenerationRequest]]) -> list[str]:
        """Everything that the requests get. Each is sent after so many tokens of a request that comes first."""
        ranks = self.ranks[screened]
        drafter = open_drafter(self.feature, self.source, ranks)  # type: ignore[arg-type]
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        waiting, made = sorted(asked, key=lambda each: each[0]), [0]
        with Engine(self.source, ranks, options, drafter) as engine:  # type: ignore[arg-type]

            def count(output: Output) -> None:
                made[0] += len(output.tokens)
                while waiting and (waiting[0][0] <= made[0] or output.finish_reason):
                    engine.submit((waiting.pop(0)[1], outputs.put))

            engine.submit((GenerationRequest("first", (3, 5, 8), 12, streamed=False), count))
            found: dict[str, list[object]] = {request.request_id: [] for _, request in asked}
            left = len(asked)
            while left:
                output = outputs.get(timeout=60)
                told = output.tokens, output.log_probs, output.top_log_probs, output.beams, output.prompt_log_probs
                found[output.request_id] += [told, output.finish_reason, output.generation_logits]
                left -= output.finish_reason is not None
        return [f"{name}: {parts}" for name, parts in found.items()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = _pair(name, tmp_path_factory.mktemp(name))
        return made[name]

    yield pair
    for each in made.values():
        for ranks in each.ranks:
            ranks.end()


def _pair(name: str, place: Path) -> Pair:
    layout, feature = CASES[name]
    model = tiny_llama(vocab_size=VOCAB)
    with torch.no_grad():  # some tokens are much likelier than others, as trained models have it
        model.lm_head.weight.mul_(torch.randn(VOCAB, 1).exp())
    half, limits = replace(layout, dtype="bfloat16"), {"max_batch_size": 10, "tokens_per_block": 4}
    engine = write_engine(
        write_checkpoint(model, place / "checkpoint", half),
        place / "engine", dtype="bfloat16", max_beam_width=3, max_num_tokens=40, **limits,
    )  # fmt: skip
    if name == "medusa":
        write_heads(engine / "medusa", sizes=(64, VOCAB))
    elif name == "eagle3":
        write_network(engine / "eagle", "eagle3", config={"vocab_size": VOCAB})
    elif name == "draft":
        draft = write_checkpoint(smaller(model, 2), place / "draft", half)
        write_engine(draft, engine / "draft_engine", dtype="bfloat16", **limits)
    if name != "eagle3":
        add_adapters(engine, [save_adapter(model, place / f"a{seed}", seed) for seed in range(ADAPTERS)])
    with pytest.MonkeyPatch.context() as patch:
        source = with_drafter(taking_adapters(open_engine(engine)), feature)
        ranks = []
        for least in (1 << 60, 0):
            patch.setattr(kernel_choice, "_SCREENED_BYTES", least)
            ranks.append(KeptRanks(source, 60))
    return Pair(source, ranks, feature)


def _sampling(chosen: random.Random) -> SamplingParams:
    """Mostly such as need few logits."""
    seed, temperature = chosen.randrange(1000), chosen.choice([None, 0.3, 1.7, 50.0])
    few = SamplingParams(top_k=chosen.choice([1, 2, 5, 50]), temperature=temperature, seed=seed)
    others = [
        SamplingParams(top_k=20, top_p=0.8, temperature=1.3, top_p_decay=0.7, seed=seed),
        SamplingParams(top_p=chosen.choice([0.9, 1.0]), temperature=0.8, seed=seed),
        SamplingParams(top_k=3, seed=seed, return_log_probs=True, top_log_probs=3),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(min_tokens=4, top_k=5, seed=seed),
        SamplingParams(prompt_log_probs=True),
        SamplingParams(top_k=chosen.choice([1, 5, 50]), min_p=chosen.choice([0.01, 0.3]), temperature=1.7, seed=seed),
        SamplingParams(top_p=chosen.choice([0.9, 1.0]), min_p=chosen.choice([0.01, 0.3]), seed=seed),
        SamplingParams(top_k=chosen.choice([1, 5]), no_repeat_ngram_size=chosen.choice([1, 2]), seed=seed),
        SamplingParams(top_k=chosen.choice([1000, 1024, 1025, VOCAB]), seed=seed),
        *2 * [SamplingParams(top_p=chosen.choice([0.9, 1.0]), min_p=chosen.choice([0.01, 0.3, 1.0]), seed=seed)],
    ]
    return chosen.choice([SamplingParams(), few, chosen.choice(others)])


def _mix(name: str, chosen: random.Random) -> list[tuple[int, GenerationRequest]]:
    asked: list[tuple[int, GenerationRequest]] = []
    for _ in range(chosen.randint(1, 6)):
        prompt = tuple(chosen.randrange(1, VOCAB) for _ in range(chosen.choice([1, 3, 8, 17, 60])))
        request = GenerationRequest(
            str(len(asked)),
            prompt[:3] * 6 if chosen.random() < 0.3 else prompt,
            chosen.choice([1, 4, 20, 40]),
            _sampling(chosen),
            end_ids=frozenset(range(chosen.randrange(40), VOCAB, 40)) if chosen.random() < 0.3 else frozenset(),
            stop_words=((chosen.randrange(VOCAB),), (5, 6)),
            bad_words=((chosen.randrange(VOCAB),),) if chosen.random() < 0.1 else (),
            lora_task_id=chosen.randint(1, ADAPTERS) if name != "eagle3" and chosen.random() < 0.5 else None,
            priority=chosen.choice([0.5, 0.9]),
            streamed=False,
        )
        if CASES[name][1] is None and chosen.random() < 0.1:
            request = replace(request, sampling=SamplingParams(), beams=BeamParams(3, 2))
        when = chosen.choice([1, 1, 2, 5, 9])
        asked.append((when, request))
        for _ in range(chosen.choice([0, 0, 0, 2])):
            changed = {"request_id": str(len(asked)), "copy_of": request.request_id, "sampling": _sampling(chosen)}
            asked.append((when, replace(request, **changed)))
    return asked


@pytest.mark.parametrize("name", CASES)
def test_a_screen_changes_no_answer(pairs: Callable[[str], Pair], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, screened = pairs(name), [0]
    need = Head.need

    def counted(head: Head, candidates: int, draws: npt.NDArray[np.int64]) -> None:
        screened[0] += candidates > 0 and head._screened is not None
        need(head, candidates, draws)

    monkeypatch.setattr(Head, "need", counted)

    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        seed=st.integers(0, 2**32),
        evicts=st.booleans(),
        reuse=st.booleans(),
        batch=st.sampled_from([1, 2, 3, 4, 10]),
    )
    def check(seed: int, evicts: bool, reuse: bool, batch: int) -> None:
        policy = "max_utilization" if evicts else "guaranteed_no_evict"
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)  # type: ignore[arg-type]
        asked = _mix(name, random.Random(seed))
        assert pair.answers(True, options, asked) == pair.answers(False, options, asked)

    check()
    assert screened[0] > 0
