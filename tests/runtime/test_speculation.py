from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.test_engine import Tokens, requests_for
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.llm_api_features import NgramFeature
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.sequence import Draft, Sequence

NGRAMS = NgramFeature(draft_tokens=5, matching=3)


class KeptRanks(ThreadRanks):
    """Ranks that one engine after another uses; `end` ends them."""

    worker_pids: tuple[int, ...] = ()

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


class Oracle:
    """Proposes what transformers continues with, wrong from a token on that depends on the position."""

    worker_pids: tuple[int, ...] = ()

    def __init__(self, answers: dict[Tokens, Tokens], length: int, right: int) -> None:
        self._answers, self._length, self._right = answers, length, right

    def draft(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            made = sequence.generated
            answer = self._answers[sequence.request.prompt][made : made + self._length]
            right = (made + self._right) % (self._length + 1)
            sequence.draft = Draft((*answer[:right], *((token + 1) % 131 for token in answer[right:])))

    def observe(self, rows: object, logits: object) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass


def sequence(tokens: list[int]) -> Sequence:
    return Sequence.of(GenerationRequest("a", tuple(tokens), 100), 0, 200, lambda output: None)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3, 4], (5, 9, 2, 3, 4)),
        ([1, 2, 3, 7, 9, 2, 3, 8, 2, 3], (8, 2, 3, 8, 2)),  # the latest occurrence
        ([9, 1, 2, 3, 5, 8, 2, 3, 6, 1, 2, 3], (5, 8, 2, 3, 6)),  # the longest n-gram
        ([1, 2, 3, 4, 1], ()),  # single tokens recur by chance
        ([7, 7, 7], (7, 7, 7, 7, 7)),
        ([4], ()),
    ],
)
def test_an_n_gram_is_followed_by_what_followed_it(tokens: list[int], expected: Tokens) -> None:
    row = sequence(tokens)
    NgramDrafter(NGRAMS).draft([row])
    assert row.draft.tokens == expected


def test_drafts_of_others_before_say_nothing_of_n_grams() -> None:
    row = sequence([1, 2, 3, 4, 5, 9, 2, 3, 4])
    row.drafted, row.accepted = 20, 0
    NgramDrafter(NGRAMS).draft([row])
    assert row.draft.tokens == (5, 9, 2, 3, 4)


def test_n_grams_of_the_output_are_found_too() -> None:
    drafter, row = NgramDrafter(NGRAMS), sequence([5])
    for token in (1, 2, 3, 1, 2):
        drafter.draft([row])
        assert row.draft.tokens == ()
        row.finish_with(token)
    drafter.draft([row])
    assert row.draft.tokens == (3, 1, 2, 3, 1)


@pytest.fixture(scope="module")
def layouts(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of blocks of 4 tokens, by layout."""
    made = {}
    for name, layout in (("one", Layout()), ("tp2", Layout(tp=2)), ("pp2", Layout(pp=2))):
        path = tmp_path_factory.mktemp(name)
        checkpoint = write_checkpoint(llama, path / "checkpoint", layout)
        made[name] = write_engine(checkpoint, path / "engine", tokens_per_block=4, max_num_tokens=24)
    return made


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_greedy_tokens_are_those_without_speculation_under_any_schedule(
    layouts: dict[str, Path], layout: str, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    source = open_engine(layouts[layout])
    ranks = {blocks: KeptRanks(source, blocks) for blocks in (30, 64)}

    @settings(max_examples=40 if layout == "one" else 8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.integers(0, 7), min_size=1, max_size=6),
        length=st.integers(1, 7),
        right=st.integers(0, 7),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from([30, 64]),
        batch=st.integers(1, 6),
    )
    def check(
        chosen: list[int], length: int, right: int, policy: SchedulerPolicy, reuse: bool, blocks: int, batch: int
    ) -> None:
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        with Engine(source, ranks[blocks], options, Oracle(answers, length, right)) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, requests_for([prompts[index] for index in chosen]))
            found = engine.statistics()
        assert [generation.tokens for generation in made] == [expected[index] for index in chosen]
        assert found.kv_blocks_used == 0
        assert 0 <= found.accepted_tokens <= found.drafted_tokens
        assert found.drafted_tokens > 0

    check()
    for each in ranks.values():
        each.end()


def test_accepted_drafts_save_steps(engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]) -> None:
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    source = open_engine(engine_directory)
    ranks = KeptRanks(source, 40)
    with Engine(source, ranks, EngineOptions(), Oracle(answers, 5, 5)) as engine:  # type: ignore[arg-type]
        (made,) = generate_with(engine, requests_for(prompts[:1]))
        found = engine.statistics()
    # 24 tokens: the prompt's step gives 1, then drafts of 0 to 5 right tokens, by position.
    assert made.tokens == expected[0]
    assert (found.iterations, found.generated_tokens) == (10, 24)
    assert (made.drafted_tokens, made.accepted_tokens) == (found.drafted_tokens, found.accepted_tokens)
    assert made.accepted_tokens == 24 - 10


class Wrong(Oracle):
    """Proposes what is never right."""

    def draft(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            following = (*self._answers[sequence.request.prompt][sequence.generated :], 0)[0]
            sequence.draft = Draft(((following + 1) % 131,) * self._length)


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_wrong_drafts_change_no_schedule(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens], policy: SchedulerPolicy
) -> None:
    """They keep no block from another request: as many iterations and pauses as without."""
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    source = open_engine(engine_directory)
    found = []
    for drafter in (None, Wrong(answers, 40, 0)):
        ranks = KeptRanks(source, 10)
        options = EngineOptions(scheduler=policy, kv_reuse=False, chunked_context=True)
        with Engine(source, ranks, options, drafter) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, requests_for(prompts))
            status = engine.statistics()
        ranks.end()
        assert [each.tokens for each in made] == expected
        found.append((status.iterations, status.paused_requests, status.drafted_tokens > 0))
    assert found[0][:2] == found[1][:2]
    assert [each[2] for each in found] == [False, True]
    assert (found[0][1] > 0) == (policy == "max_utilization")


def test_n_grams_change_no_token(engine_directory: Path, llama: LlamaForCausalLM) -> None:
    prompt = [[5, 17, 9, 60, 5, 17, 9, 60, 5, 17, 9, 60] * 4]
    (expected,) = greedy(llama, prompt, 64)
    (made,) = generate(engine_directory, requests_for(prompt, 64), EngineOptions(speculation=NGRAMS))
    assert made.tokens == expected
    assert made.drafted_tokens > made.accepted_tokens > 0


def test_end_ids_stop_words_penalties_and_lengths_hold_within_a_draft(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    plain = requests_for(prompts[:3], 20)
    asked = [
        replace(plain[0], end_ids=frozenset({expected[0][7]})),
        replace(plain[1], stop_words=(expected[1][6:8],)),
        replace(plain[2], max_tokens=11),
        *(replace(each, sampling=SamplingParams(repetition_penalty=1.4, min_tokens=3)) for each in plain),
        *(replace(each, bad_words=((expected[0][3],), expected[1][2:4])) for each in plain),
        *(replace(each, sampling=SamplingParams(return_log_probs=True, top_log_probs=2)) for each in plain),
        *(replace(each, sampling=SamplingParams(top_k=20, temperature=1.3, seed=5)) for each in plain),
        *(replace(each, sampling=SamplingParams(top_p=1.0, min_p=0.2, no_repeat_ngram_size=2)) for each in plain),
    ]
    source = open_engine(engine_directory)
    made = []
    for drafter in (None, Oracle(answers, 6, 6)):
        with Engine(source, KeptRanks(source, 96), EngineOptions(kv_reuse=False), drafter) as engine:  # type: ignore[arg-type]
            made.append(generate_with(engine, asked))
    for without, drafted in zip(*made, strict=True):
        assert (drafted.tokens, drafted.finish_reason) == (without.tokens, without.finish_reason)
        assert drafted.log_probs == pytest.approx(without.log_probs, abs=1e-4)
        assert len(drafted.top_log_probs) == len(without.top_log_probs)
    assert sum(each.accepted_tokens for each in made[1]) > 30


def test_sampling_from_a_drafts_distribution_keeps_the_targets() -> None:
    """Chi-square over 6,000 seeds: proposals from one distribution, verified for another."""
    from trtforge.runtime.sampler import Sampler

    vocab, count = 30, 6_000
    generator = torch.Generator().manual_seed(3)
    logits, other = (torch.randn(vocab, generator=generator) * 1.5 for _ in range(2))
    drawn_from = other.softmax(0)
    wanted = (logits / 0.8).topk(12)
    probabilities = torch.zeros(vocab).scatter(0, wanted.indices, wanted.values.softmax(0))
    proposals = torch.multinomial(drawn_from, count, replacement=True, generator=generator).tolist()
    rows = []
    for seed, proposed in enumerate(proposals):
        params = SamplingParams(temperature=0.8, top_k=12, seed=seed)
        row = Sequence.of(GenerationRequest("a", (1, 2), 9, params), 0, 99, lambda output: None)
        row.draft = Draft((proposed,), drawn_from.unsqueeze(0))
        rows.append(row)
    sampler = Sampler(vocab, torch.device("cpu"))
    tokens = torch.tensor(sampler.sample(rows, logits.repeat(count, 1)).tokens)
    found = torch.bincount(tokens, minlength=vocab).double()
    kept = probabilities > 0
    expected = probabilities[kept].double() * count
    assert int(found[~kept].sum()) == 0
    assert float(((found[kept] - expected) ** 2 / expected).sum()) < 31.3  # 11 degrees of freedom, p = 0.001
    accepted = float((tokens == torch.tensor(proposals)).double().mean())
    assert accepted == pytest.approx(float(torch.minimum(drawn_from, probabilities).sum()), abs=0.05)
    after = sampler.sample(rows[:50], logits.repeat(50, 1), depth=1).tokens  # beyond the drafts: an ordinary draw
    for row in rows[:50]:
        row.draft = Draft()
    assert after == sampler.sample(rows[:50], logits.repeat(50, 1)).tokens


def test_sampled_tokens_of_a_seed_are_those_without_certain_drafts(engine_directory: Path) -> None:
    """An n-gram is proposed with certainty: rejection sampling then is to draw a token and compare."""
    prompt = tuple([3, 4, 5, 6] * 8)
    asked = [
        GenerationRequest(str(seed), prompt, 40, SamplingParams(top_p=0.9, temperature=0.4, seed=seed))
        for seed in range(8)
    ]
    without = generate(engine_directory, asked)
    drafted = generate(engine_directory, asked, EngineOptions(speculation=NGRAMS))
    assert [each.tokens for each in drafted] == [each.tokens for each in without]
    assert sum(each.drafted_tokens for each in drafted) > 0


def test_with_too_many_requests_nothing_is_drafted() -> None:
    drafter = NgramDrafter(NgramFeature(draft_tokens=2, matching=2, max_requests=1))
    rows = [sequence([1, 2, 3, 1, 2]) for _ in range(2)]
    drafter.draft(rows)
    assert [row.draft.tokens for row in rows] == [(), ()]
    drafter.draft(rows[:1])
    assert rows[0].draft.tokens == (3, 1)
