"""Lookahead decoding: what the Jacobi iterations find, and answers that do not depend on it."""

from collections.abc import Callable
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
from tests.runtime.test_speculation import KeptRanks, sequence
from trtforge.core.features import LookaheadFeature
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.messages import Submission
from trtforge.engine_process.requests import GenerationRequest, LookaheadSizes, SamplingParams
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.lookahead import LookaheadDrafter
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Sequence

LOOKAHEAD = LookaheadFeature(window=4, ngram=3, verification=2)
VOCABULARY = 20


def counting(tokens: list[int]) -> int:
    """A model that counts on from the last token."""
    return (tokens[-1] + 1) % VOCABULARY


def step(drafter: LookaheadDrafter, row: Sequence, model: Callable[[list[int]], int]) -> tuple[Tokens, int]:
    """One step as the engine makes it: the draft, and how many of its tokens were right."""
    drafter.draft([row])
    drafts = row.draft.tokens
    made = [model([*row.tokens, *drafts[:count]]) for count in range(len(drafts) + 1)]
    logits = torch.nn.functional.one_hot(torch.tensor(made), VOCABULARY).float()
    drafter.observe([Row(row, len(row.tokens) - 1, 1, samples=True, drafts=drafts)], logits)
    right = 0
    while right < len(drafts) and drafts[right] == made[right]:
        right += 1
    row.tokens += made[: right + 1]
    row.drafted, row.accepted = row.drafted + len(drafts), row.accepted + right
    return drafts, right


def test_the_window_finds_n_grams_that_the_text_does_not_have() -> None:
    drafter, row = LookaheadDrafter(LOOKAHEAD), sequence([10, 3])
    for last in range(4, 11):
        drafts, right = step(drafter, row, counting)
        assert (row.tokens[-1], right) == (last, 0)
        assert len(drafts) == 3  # the window without the token that is known
    drafts, right = step(drafter, row, counting)
    assert drafts[:2] == (11, 12)  # the text has 10 followed by 3 only
    assert right >= 2
    assert row.tokens[:2] == [10, 3]
    assert row.tokens[2:] == list(range(4, 4 + len(row.tokens) - 2))


def test_each_guess_is_what_the_model_gave_after_the_guess_before_it() -> None:
    drafter, row = LookaheadDrafter(LookaheadFeature(window=4, ngram=3, verification=0)), sequence([7])
    first, _ = step(drafter, row, counting)
    assert first == (7, 7, 7)  # a prompt of one token: nothing else to begin with
    second, _ = step(drafter, row, counting)
    assert second[:2] == (8, 8)
    third, _ = step(drafter, row, counting)
    assert third[0] == 9
    assert row.tokens == [7, 8, 9, 10]


def test_n_grams_of_the_text_continue_each_other_and_get_fewer_when_one_is_wrong() -> None:
    drafter = LookaheadDrafter(LookaheadFeature(window=1, ngram=3, verification=3))
    row = sequence([1, 2, 3, 4, 5, 6, 7, 8, 1])
    drafter.draft([row])
    assert row.draft.tokens == (2, 3, 4, 5, 6, 7)
    row.tokens += [2, 3, 9, 1]  # two of six were right: one n-gram
    row.accepted = 2
    drafter.draft([row])
    assert row.draft.tokens == (2, 3, 9, 1)
    row.tokens += [2, 3, 9, 1, 2]
    row.accepted += 4
    drafter.draft([row])
    assert row.draft.tokens == (3, 9, 1, 2, 3, 9)


def test_a_request_may_ask_for_less() -> None:
    drafter = LookaheadDrafter(LOOKAHEAD)
    plain = sequence([1, 2, 1, 2, 1])
    off, small = (
        Sequence.of(replace(plain.request, lookahead=sizes), 0, 200, lambda output: None)
        for sizes in (LookaheadSizes(1, 1, 0), LookaheadSizes(2, 2, 1))
    )
    drafter.draft([plain, off, small])
    assert len(plain.draft.tokens) == 2 * 2 + 3
    assert off.draft.tokens == ()
    assert small.draft.tokens == (2, small.draft.tokens[1])
    assert all(len(row.draft.tokens) <= LOOKAHEAD.draft_tokens for row in (plain, off, small))


@pytest.fixture(scope="module")
def sources(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, layout in (("one", Layout()), ("split", Layout(tp=2, pp=2))):
        place = tmp_path_factory.mktemp(name)
        checkpoint = write_checkpoint(llama, place / "checkpoint", layout)
        made[name] = write_engine(checkpoint, place / "engine", tokens_per_block=4, max_num_tokens=24)
    return made


@pytest.mark.parametrize("layout", ["one", "split"])
def test_greedy_tokens_are_those_without_it_under_any_schedule(
    sources: dict[str, Path], layout: str, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    source = open_engine(sources[layout])
    ranks = {blocks: KeptRanks(source, blocks) for blocks in (30, 64)}

    @settings(max_examples=20 if layout == "one" else 4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        chosen=st.lists(st.integers(0, 7), min_size=1, max_size=6),
        sizes=st.tuples(st.integers(1, 5), st.integers(2, 5), st.integers(1, 4)),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        reuse=st.booleans(),
        blocks=st.sampled_from([30, 64]),
        batch=st.integers(1, 6),
    )
    def check(
        chosen: list[int], sizes: tuple[int, int, int], policy: SchedulerPolicy, reuse: bool, blocks: int, batch: int
    ) -> None:
        feature = LookaheadFeature(window=sizes[0], ngram=sizes[1], verification=sizes[2])
        options = EngineOptions(scheduler=policy, kv_reuse=reuse, chunked_context=True, max_batch_size=batch)
        with Engine(source, ranks[blocks], options, LookaheadDrafter(feature)) as engine:  # type: ignore[arg-type]
            made = generate_with(engine, requests_for([prompts[index] for index in chosen]))
            found = engine.statistics()
        assert [generation.tokens for generation in made] == [expected[index] for index in chosen]
        assert found.kv_blocks_used == 0
        assert sum(each.drafted_tokens for each in made) == found.drafted_tokens
        assert sum(each.accepted_tokens for each in made) == found.accepted_tokens <= found.drafted_tokens

    check()
    for each in ranks.values():
        each.end()


def test_accepted_n_grams_save_steps(engine_directory: Path, llama: LlamaForCausalLM) -> None:
    prompt = [[5, 17, 9, 60, 5, 17, 9, 60, 5, 17, 9, 60] * 4]
    (expected,) = greedy(llama, prompt, 64)
    options = EngineOptions(speculation=LOOKAHEAD)
    with Engine.load(engine_directory, options) as engine:
        asked = requests_for(prompt, 64)
        (made,) = generate_with(engine, asked)
        steps = engine.statistics().iterations
        (plain,) = generate_with(engine, [replace(asked[0], lookahead=LookaheadSizes(1, 1, 0))])
    assert made.tokens == plain.tokens == expected
    assert made.drafted_tokens > made.accepted_tokens > 10
    assert steps <= 64 - made.accepted_tokens
    assert (plain.drafted_tokens, plain.accepted_tokens) == (0, 0)


def test_sampled_tokens_of_a_seed_are_those_without_it(engine_directory: Path) -> None:
    prompt = tuple([3, 4, 5, 6] * 8)
    asked = [
        GenerationRequest(str(seed), prompt, 40, SamplingParams(top_p=0.9, temperature=0.4, seed=seed))
        for seed in range(8)
    ]
    without = generate(engine_directory, asked)
    drafted = generate(engine_directory, asked, EngineOptions(speculation=LOOKAHEAD))
    assert [each.tokens for each in drafted] == [each.tokens for each in without]
    assert sum(each.accepted_tokens for each in drafted) > 0


@pytest.mark.parametrize(
    ("sizes", "message", "hint"),
    [
        ((5, 3, 2), "lookahead_window_size is 5", "It must be from 1 to this engine's 4."),
        ((4, 4, 2), "lookahead_ngram_size is 4", "It must be from 1 to this engine's 3."),
        ((4, 3, 3), "lookahead_verification_set_size is 3", "It must be from 0 to this engine's 2."),
        ((0, 3, 2), "lookahead_window_size is 0", "It must be from 1 to this engine's 4."),
        ((2, 1, 0), "lookahead_ngram_size is 1, so no tokens are drafted", "Use 2 or more"),
    ],
)
def test_sizes_beyond_the_engines_are_refused(
    engine_directory: Path, sizes: tuple[int, int, int], message: str, hint: str
) -> None:
    asked = GenerationRequest("a", (1, 2), 3, lookahead=LookaheadSizes(*sizes))
    (made,) = generate(engine_directory, [asked], EngineOptions(speculation=LOOKAHEAD))
    assert made.error is not None
    assert made.error.message == message
    assert made.error.hint.startswith(hint)
    (without,) = generate(engine_directory, [asked])
    assert without.error is not None
    assert without.error.message == "this engine has no lookahead decoding"


def test_sizes_reach_the_engine_process() -> None:
    asked = GenerationRequest("0", (1, 2), 3, lookahead=LookaheadSizes(2, 3, 1))
    sent = Submission((asked, replace(asked, lookahead=None)))
    assert [each.lookahead for each in Submission.decode(sent.encode()).requests] == [LookaheadSizes(2, 3, 1), None]
