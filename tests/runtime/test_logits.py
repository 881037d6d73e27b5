"""Logits of prompts and outputs are those of transformers, under any schedule."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import write_engine
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.messages import Submission, Update, decode_updates, encode_updates
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Output, SamplingParams
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate_with
from trtforge.runtime.ranks.source import Source, open_engine
from trtforge.runtime.scheduling.admission import wrong_logits

VOCAB, NEW = 131, 10
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(top_k=20, temperature=1.3, seed=3, repetition_penalty=1.2, prompt_log_probs=True),
)


@pytest.fixture(scope="module")
def source(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("logits") / "engine"
    found = open_engine(write_engine(checkpoint, directory, tokens_per_block=4, max_num_tokens=24))
    features = FeaturesConfig(context_logits=True, generation_logits=True)
    return replace(found, forge=found.forge.model_copy(update={"features": features}))


def check(llama: LlamaForCausalLM, prompt: list[int], made: Generation) -> None:
    """Compare with the logits of prompt and output; the last token's are not computed."""
    with torch.no_grad():
        reference = llama(torch.tensor([[*prompt, *made.tokens]])).logits[0]
    context, generation = (as_rows(data) for data in (made.context_logits, made.generation_logits))
    torch.testing.assert_close(context, reference[: len(prompt)], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(generation, reference[len(prompt) - 1 : -1], atol=2e-4, rtol=2e-4)


def as_rows(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.float32).copy()).view(-1, VOCAB)


def test_no_schedule_changes_logits(llama: LlamaForCausalLM, source: Source, prompts: list[list[int]]) -> None:
    ranks = {blocks: KeptRanks(source, blocks) for blocks in (30, 64)}

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=5),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        blocks=st.sampled_from([30, 64]),
        batch=st.integers(1, 5),
        drafts=st.booleans(),
    )
    def run(chosen: list[tuple[int, bool]], policy: SchedulerPolicy, blocks: int, batch: int, drafts: bool) -> None:
        options = EngineOptions(scheduler=policy, chunked_context=True, max_batch_size=batch)
        asked = [
            GenerationRequest(
                str(place), tuple(prompts[n]), NEW, SAMPLINGS[sampled], context_logits=True, generation_logits=True
            )
            for place, (n, sampled) in enumerate(chosen)
        ]
        with Engine(source, ranks[blocks], options, NgramDrafter(NGRAMS) if drafts else None) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, asked)
        for (number, _), generation in zip(chosen, made, strict=True):
            check(llama, prompts[number], generation)

    run()
    for each in ranks.values():
        each.end()


def test_an_end_id_has_no_row_and_what_is_not_asked_for_is_not_returned(
    llama: LlamaForCausalLM, source: Source, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    ranks = KeptRanks(source, 64)
    ended = GenerationRequest("a", tuple(prompts[1]), NEW, context_logits=True, generation_logits=True)
    asked = [
        replace(ended, end_ids=frozenset({expected[1][4]})),
        replace(ended, end_ids=frozenset({expected[1][0]})),
        replace(ended, context_logits=False),
        replace(ended, generation_logits=False),
        GenerationRequest("e", tuple(prompts[1]), NEW),
    ]
    with Engine(source, ranks, EngineOptions()) as engine:  # type: ignore[arg-type]
        made = generate_with(engine, asked)
    ranks.end()
    prompt, row = len(prompts[1]), 4 * VOCAB
    sizes = [(len(each.context_logits) // row, len(each.generation_logits) // row) for each in made]
    assert sizes == [(prompt, 4), (prompt, 0), (0, NEW), (prompt, 0), (0, 0)]
    check(llama, prompts[1], made[0])


def test_logits_that_an_engine_does_not_return_are_refused(source: Source, checkpoint: Path, tmp_path: Path) -> None:
    ranks = KeptRanks(source, 64)
    wanted = GenerationRequest("a", (1, 2, 3), NEW, context_logits=True)
    plain = replace(source, forge=source.forge.model_copy(update={"features": FeaturesConfig()}))

    def refused(own: Source, request: GenerationRequest) -> str:
        with Engine(own, ranks, EngineOptions()) as engine:  # type: ignore[arg-type]
            (made,) = generate_with(engine, [request])
        assert made.error is not None
        return made.error.message

    assert refused(plain, wanted) == "this engine returns no context logits"
    generation = replace(wanted, context_logits=False, generation_logits=True)
    assert refused(plain, generation) == "this engine returns no generation logits"
    most = replace(generation, max_tokens=600_000)
    limits = replace(source.limits, max_seq_len=700_000)
    error = wrong_logits(most, source.forge.features, VOCAB, limits)
    assert error is not None
    assert error.message == "the logits of 600000 tokens take 314400000 bytes, the limit of an answer is 268435456"
    assert wrong_logits(most, source.forge.features, VOCAB, source.limits) is None, "answers end at max_seq_len"
    beams = replace(source, limits=replace(source.limits, max_beam_width=2))
    assert refused(beams, replace(wanted, beams=BeamParams(2, 2))) == "beam search does not return logits"
    ranks.end()


def test_logits_pass_between_processes() -> None:
    request = GenerationRequest("4", (1, 2), 3, context_logits=True, lora_task_id=2)
    (decoded,) = Submission.decode(Submission((request,), None, 4).encode()).requests
    assert (decoded.context_logits, decoded.generation_logits, decoded.lora_task_id) == (True, False, 2)
    updates = {4: Update(), 5: Update(), 6: Update()}
    updates[4].add(Output("4", (7,), context_logits=b"abcd", generation_logits=b"efgh"))
    updates[5].add(Output("5", (8,)))
    updates[6].add(Output("6", (9,), generation_logits=b"ijkl"))
    later = Update()
    later.add(Output("6", (10,), generation_logits=b"mnop"))
    updates[6].merge(later)
    found = decode_updates(encode_updates(updates))
    assert [(bytes(each.context_logits), bytes(each.generation_logits)) for each in found.values()] == [
        (b"abcd", b"efgh"),
        (b"", b""),
        (b"", b"ijklmnop"),
    ]
    assert found[6].tokens == [9, 10]
