"""A prompt on one engine, its answer on another one: what programs hand from the one to the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtforge import Engine, SamplingParams
from trtforge.api.answers import Assembly
from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import GenerationRequest, Output

PROMPT = "A list holds several values in their order, and a tuple does so too. " * 4


@pytest.fixture(scope="module")
def pair(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    files = tmp_path_factory.mktemp("kv")
    with Engine.load(build, kv_cache_dir=files) as contexts, Engine.load(build, kv_cache_dir=files) as answers:
        yield contexts, answers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.9, "temperature": 1.5, "seed": 7},
        {"top_log_probs": 2},
        {"stop": ["the"]},
        {"regex": "[a-z]{3}"},
        {"max_tokens": 1},
    ],
)
def test_the_answer_is_the_one_of_a_single_engine(pair: tuple[Engine, Engine], options: dict[str, Any]) -> None:
    contexts, answers = pair
    options = {"max_tokens": 10, **options}
    first = contexts.generate(PROMPT, SamplingParams(**options, context_only=True))
    assert first.context_phase is not None
    assert (len(first.tokens), first.finish_reason) == (1, "length" if options["max_tokens"] == 1 else "not_finished")
    answer = answers.generate(PROMPT, SamplingParams(**options, context_phase=first.context_phase))
    alone = contexts.generate(PROMPT, SamplingParams(**options))
    assert (answer.text, answer.tokens, answer.finish_reason) == (alone.text, alone.tokens, alone.finish_reason)
    assert [score.token for score in answer.log_probs] == [score.token for score in alone.log_probs]
    assert answer.cumulative_log_prob == pytest.approx(alone.cumulative_log_prob, abs=1e-4)
    assert [[top.token for top in score.top] for score in answer.log_probs] == [
        [top.token for top in score.top] for score in alone.log_probs
    ]
    assert answer.context_phase is None
    if options["max_tokens"] > 1:
        assert answer.usage.reused_tokens >= answer.usage.prompt_tokens - 32


def test_a_stream_begins_with_the_first_token(pair: tuple[Engine, Engine]) -> None:
    first = pair[0].generate(PROMPT, SamplingParams(max_tokens=6, context_only=True))
    pieces = list(pair[1].stream(PROMPT, SamplingParams(max_tokens=6, context_phase=first.context_phase)))
    assert pieces[0].tokens == first.tokens
    assert sum(len(piece.tokens) for piece in pieces) == 6


@pytest.mark.parametrize("reason", ["cancelled", "timed_out"])
def test_a_context_that_was_cut_hands_nothing_on(pair: tuple[Engine, Engine], reason: Any) -> None:
    """Another engine would take it for an answer that ended with its first token."""
    request = GenerationRequest("0", (5,), 4, end_ids=frozenset({2}), context_only=True)
    assembly = Assembly([request], (), pair[0]._texts, continues=True)
    answer = assembly.answer(assembly.take(Output("0", finish_reason=reason)))
    assert (answer.finish_reason, answer.context_phase) == (reason, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 2, "context_only": True}, "n is 2, but a context or generation phase has one sequence"),
        ({"context_phase": b"{}"}, "context_phase_params are not those of an embedded engine"),
        ({"context_phase": "text"}, "context_phase is 'text'"),
        ({"context_only": True, "beam_width": 2}, "beam_width is 2"),
    ],
)
def test_what_does_not_go_together_is_refused(pair: tuple[Engine, Engine], options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        pair[0].generate(PROMPT, SamplingParams(**options))
