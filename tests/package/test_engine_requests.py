"""Tensors of the engine model: requests for beams, and the tensors that answer them."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import DEMO_MODEL
from trtforge.engine_process.messages import Submission, Update, decode_updates, encode_updates
from trtforge.engine_process.requests import Beam, BeamParams, DraftTokens, GenerationRequest
from trtforge.engine_process.retention import KvCacheRetention, TokenRangeRetention
from trtforge.formats.triton import newest_release, text_flow

pytestmark = pytest.mark.usefixtures("library")


def inputs(**given: Any) -> dict[str, Any]:
    dtypes = {float: np.float32, int: np.int32, bool: np.bool_}
    values = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 4} | given
    return {
        name: value
        if isinstance(value, np.ndarray)
        else np.array([value] if isinstance(value, list) else [[value]], dtype=dtypes.get(type(value), np.int32))
        for name, value in values.items()
    }


def asked(most: int = 4, **given: Any) -> Any:
    from engine_requests import RequestLimits, requested_sequences  # type: ignore[import-not-found]

    return requested_sequences(inputs(**given), RequestLimits(100, 8, (2,), most))


def kept(*priorities: int, **more: list[int]) -> dict[str, Any]:
    """Tensors of ranges with these priorities, by default one of the whole prompt."""
    values = {"starts": [0], "ends": [-1], "priorities": list(priorities), **more}
    return {f"retention_token_range_{name}": value for name, value in values.items()}


def test_beams_have_tensorrt_llms_names_and_defaults() -> None:
    (one,) = asked(beam_width=3)
    assert one.request.beams == BeamParams(width=3, returned=3, length_penalty=0.0, early_stopping=True)
    (two,) = asked(beam_width=4, num_return_sequences=2, len_penalty=1.5, early_stopping=False)
    assert two.request.beams == BeamParams(4, 2, 1.5, False)
    (diverse,) = asked(beam_width=2, beam_search_diversity_rate=0.5)
    assert diverse.request.beams == BeamParams(2, 2, diversity_rate=0.5)
    (single,) = asked(beam_width=1, len_penalty=2.0, beam_search_diversity_rate=0.5)
    assert single.request.beams is None
    assert len(asked(num_return_sequences=3)) == 3


def test_draft_tokens_have_tensorrt_llms_tensors() -> None:
    logits = np.arange(200, dtype=np.float16).reshape(1, 2, 100)
    given = inputs(draft_input_ids=[7, 9], draft_acceptance_threshold=0.25) | {"draft_logits": logits}
    from engine_requests import RequestLimits, requested_sequences

    for found in requested_sequences(given | {"num_return_sequences": np.array([[2]])}, RequestLimits(100, 8, (2,))):
        drafts = found.request.drafts
        assert (drafts.tokens, drafts.threshold) == ((7, 9), 0.25)
        assert np.frombuffer(drafts.logits, dtype=np.float32).tolist() == list(range(200))
    (plain,) = asked(draft_input_ids=[7])
    assert plain.request.drafts == DraftTokens((7,))
    (none,) = asked(draft_acceptance_threshold=0.0)
    assert none.request.drafts is None
    two = inputs() | {"input_ids": np.array([[5, 6], [7, 8]]), "input_lengths": np.array([[2], [2]])}
    two |= {"request_output_len": np.array([[4], [4]]), "draft_input_ids": np.array([[1, 2], [3, 4]])}
    found = requested_sequences(two, RequestLimits(100, 8, (2,)))
    assert [each.request.drafts.tokens for each in found] == [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_input_ids": [100]}, "draft_input_ids holds the id 100; ids are from 0 to 99"),
        ({"draft_input_ids": [-1]}, "draft_input_ids holds the id -1; ids are from 0 to 99"),
        ({"logits": (1, 1, 100)}, "draft_input_ids is missing: draft_logits is about these tokens"),
        ({"draft_acceptance_threshold": 0.5}, "draft_input_ids is missing: draft_acceptance_threshold is about"),
        ({"draft_input_ids": [7], "draft_acceptance_threshold": 1.5}, "draft_acceptance_threshold is 1.5; it must be"),
        ({"draft_input_ids": [7], "draft_acceptance_threshold": -0.5}, "draft_acceptance_threshold is -0.5"),
        ({"draft_input_ids": [7], "logits": (1, 2, 100)}, "draft_logits is float32 [2, 100]; it must be"),
        ({"draft_input_ids": [7], "logits": (1, 1, 99)}, "draft_logits is float32 [1, 99]; it must be"),
        ({"draft_input_ids": [7], "logits": (1, 1, 100), "value": np.nan}, "draft_logits is nan; it must be a finite"),
        ({"draft_input_ids": [7], "logits": (1, 1, 100), "value": -np.inf}, "draft_logits is -inf; it must be a"),
    ],
)
def test_wrong_draft_tokens_are_refused_by_their_input(given: dict[str, Any], message: str) -> None:
    from engine_requests import RequestLimits, requested_sequences
    from responder import RequestFailed  # type: ignore[import-not-found]

    shape, value = given.pop("logits", None), given.pop("value", 0.0)
    more = {} if shape is None else {"draft_logits": np.full(shape, value, dtype=np.float32)}
    with pytest.raises(RequestFailed) as caught:
        requested_sequences(inputs(**given) | more, RequestLimits(100, 8, (2,)))
    assert str(caught.value).startswith(message)
    with pytest.raises(RequestFailed, match=r"is not supported by this engine|this engine supports only 0"):
        requested_sequences(inputs(**given) | more, RequestLimits(100, 8, (2,), takes_drafts=False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 5}, "beam_width is 5; it must be a whole number from 1 to 4"),
        ({"beam_width": 2, "most": 1}, "beam_width is 2; this model returns only 1 beam"),
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 2, "streaming": True}, "streaming is true and beam_width 2: only one beam can be streamed"),
        ({"beam_width": 2, "num_return_sequences": 3}, "num_return_sequences is 3"),
        ({"beam_width": 2, "beam_search_diversity_rate": -0.5}, "beam_search_diversity_rate is -0.5"),
        ({"beam_width": 2, "len_penalty": float("nan")}, "len_penalty is nan"),
        ({"stop_words_list": [[1] * 16385] * 2}, "stop_words_list is 16385 tokens; it must be at most 16384"),
        ({"bad_words_list": [[1] * 16385] * 2}, "bad_words_list is 16385 tokens; it must be at most 16384"),
        ({"priority": 1.5}, "priority is 1.5; it must be from 0 to 1"),
        ({"priority": -0.5}, "priority is -0.5; it must be a finite number, at least 0"),
        (
            {"cache_salt": np.array([["a" * 1025]], dtype=object)},
            "cache_salt is 1025 characters; it must be at most 1024",
        ),
        (kept(101), "retention_token_range_priorities is 101; it must be a whole number from 0 to 100"),
        (kept(-1), "retention_token_range_priorities is -1; it must be a whole number from 0 to 100"),
        (kept(50, ends=[0]), "retention_token_range_ends is 0; it must be greater than the start of its range, 0"),
        (kept(50, ends=[-2]), "retention_token_range_ends is -2; it must be greater than the start of its range, 0"),
        (kept(50, starts=[-1]), "retention_token_range_starts is -1; it must be at least 0"),
        (kept(50, durations_ms=[-2]), "retention_token_range_durations_ms is -2; it must be at least 0"),
        (
            kept(50, 60, starts=[0, 63], ends=[64, -1]),
            "retention_token_range_starts is 63, in the range from 0 to 64; ranges must not overlap",
        ),
        (
            kept(50, 60, starts=[0, 63], ends=[-1, 80]),
            "retention_token_range_starts is 63, in the range from 0 to the prompt's end; ranges must not overlap",
        ),
        (kept(50, ends=[4, 8]), "retention_token_range_ends has 2 values, retention_token_range_starts has 1"),
        (kept(50, 60), "retention_token_range_priorities has 2 values, retention_token_range_starts has 1"),
        (
            kept(50, durations_ms=[1, 2]),
            "retention_token_range_durations_ms has 2 values, retention_token_range_starts has 1",
        ),
        (
            {"retention_token_range_priorities": [50]},
            "retention_token_range_priorities has 1 values, retention_token_range_starts has 0",
        ),
        (
            {"retention_decode_priority": 101},
            "retention_decode_priority is 101; it must be a whole number from 0 to 100",
        ),
        ({"retention_decode_duration_ms": -2}, "retention_decode_duration_ms is -2; it must be at least 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_input(given: dict[str, Any], message: str) -> None:
    from responder import RequestFailed  # type: ignore[import-not-found]

    with pytest.raises(RequestFailed) as caught:
        asked(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["return_log_probs", "streaming", "early_stopping"])
def test_a_flag_is_the_same_for_all_prompts_of_a_request(name: str) -> None:
    from engine_requests import RequestLimits, requested_sequences
    from responder import RequestFailed

    def asked_of_two(*flags: bool) -> list[Any]:
        both = {key: np.repeat(value, 2, axis=0) for key, value in inputs(beam_width=2, streaming=False).items()}
        found: list[Any] = requested_sequences(both | {name: np.array([flags]).T}, RequestLimits(100, 8, (2,), 4))
        return found

    assert [each.item for each in asked_of_two(False, False)] == [0, 1]
    with pytest.raises(RequestFailed, match=f"^{name} is true for some prompts only; send the others in another"):
        asked_of_two(False, True)


def test_clients_read_their_own_names_of_the_tensors_that_are_refused() -> None:
    from text_model import TextModel  # type: ignore[import-not-found]

    flow = text_flow(newest_release())
    model = object.__new__(type("Model", (TextModel,), {"connect": None}))
    model._to_preprocessing, model._to_engine = flow.text_to_preprocessing, flow.text_to_engine
    model._preprocessed = flow.preprocessing_to_engine
    shown, sent = model._engine_names(), {ours for ours, _ in (*flow.text_to_preprocessing, *flow.text_to_engine)}
    assert set(shown.values()) <= sent
    assert (shown["decoder_input_ids"], shown["prompt_table_extra_ids"]) == (
        "decoder_text_input",
        "prompt_table_extra_id",
    )


def test_beams_are_answered_as_padded_rows() -> None:
    from engine_outputs import SequenceState, Wanted  # type: ignore[import-not-found]

    request = GenerationRequest("1", (5, 6), 4, end_ids=frozenset({2}), beams=BeamParams(2, 2))
    sent = Submission((request,), None, 1)
    assert Submission.decode(sent.encode()).requests[0].beams == request.beams
    beams = (Beam((7, 8, 9), (-0.5, -0.25, -0.25), -1.0, "length"), Beam((7,), (-0.5,), -1.5, "end_id"))
    update = decode_updates(encode_updates({1: Update(finish_reason="length", beams=beams)}))[1]
    state = SequenceState(0, 0, request, 0)
    state.take(update)
    assert state.finished
    tensors = state.token_outputs(with_prompt=False)
    assert tensors["output_ids"].tolist() == [[[7, 8, 9], [7, 2, 2]]]
    assert tensors["sequence_length"].tolist() == [[3, 1]]
    assert state.token_outputs(with_prompt=True)["output_ids"].tolist() == [[[5, 6, 7, 8, 9], [5, 6, 7, 2, 2]]]
    scores = state.optional_outputs(Wanted.of(inputs(return_log_probs=True, return_perf_metrics=True), 1, 1))
    assert scores["cum_log_probs"].tolist() == [[-1.0, -1.5]]
    assert scores["output_log_probs"].tolist() == [[[-0.5, -0.25, -0.25], [-0.5, 0, 0]]]


def test_acceptance_of_drafts_is_reported_with_performance() -> None:
    from engine_outputs import SequenceState, Wanted

    state = SequenceState(0, 0, GenerationRequest("1", (5,), 4), 0)
    state.take(Update([1, 2, 3], finish_reason="length", drafted_tokens=8, accepted_tokens=2))
    found = state.optional_outputs(Wanted.of(inputs(return_perf_metrics=True), 1, 1))
    assert found["total_draft_tokens"].tolist() == [[8]]
    assert found["total_accepted_draft_tokens"].tolist() == [[2]]
    assert found["acceptance_rate"].tolist() == [[0.25]]


@pytest.mark.parametrize(("reason", "cut"), [("length", False), ("cancelled", True), ("timed_out", True)])
def test_a_context_that_was_cut_hands_nothing_on(reason: Any, *, cut: bool) -> None:
    """Another server would take it for an answer that ended with its first token."""
    from engine_outputs import SequenceState, Wanted

    request = GenerationRequest("1", (5,), 4, end_ids=frozenset({2}), context_only=True)
    state = SequenceState(0, 0, request, 0)
    state.take(Update([] if cut else [7], finish_reason=reason))
    assert ("context_phase_params" not in state.optional_outputs(Wanted.of({}, 1, 1))) == cut


def test_a_priority_arrives_at_the_engine_with_all_sequences_of_the_request() -> None:
    found = asked(num_return_sequences=2, priority=0.75)
    sent = Submission(tuple(each.request for each in found), None, 40).encode()
    assert [request.priority for request in Submission.decode(sent).requests] == [0.75, 0.75]
    assert [each.request.priority for each in asked()] == [0.5]
    assert [each.request.priority for each in asked(priority=0.0)] == [0.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        (kept(80), KvCacheRetention((TokenRangeRetention(0, None, 80),))),
        (
            kept(90, 10, starts=[4, 0], ends=[9, 4], durations_ms=[-1, 5000]),
            KvCacheRetention((TokenRangeRetention(4, 9, 90), TokenRangeRetention(0, 4, 10, 5000))),
        ),
        (
            kept(0) | {"retention_decode_priority": 100, "retention_decode_duration_ms": 7},
            KvCacheRetention((TokenRangeRetention(0, None, 0),), 100, 7),
        ),
        ({"retention_decode_priority": 5}, KvCacheRetention((), 5)),
        ({"retention_decode_duration_ms": -1}, KvCacheRetention()),
    ],
)
def test_how_long_blocks_are_kept_arrives_at_the_engine(
    given: dict[str, Any], expected: KvCacheRetention | None
) -> None:
    found = asked(num_return_sequences=2, **given)
    sent = Submission(tuple(each.request for each in found), None, 40).encode()
    assert [request.kv_retention for request in Submission.decode(sent).requests] == [expected] * 2


def test_each_prompt_of_a_request_has_its_own_ranges() -> None:
    from engine_requests import RequestLimits, requested_sequences

    one = inputs(**kept(80, starts=[0], ends=[4]))
    both = {name: np.repeat(value, 2, axis=0) for name, value in one.items()}
    both["retention_token_range_priorities"] = np.array([[80], [20]])
    found = requested_sequences(both, RequestLimits(100, 8, (2,), 4))
    assert [each.request.kv_retention.ranges[0].priority for each in found] == [80, 20]


def test_a_salt_arrives_at_the_engine_with_all_sequences_of_the_request() -> None:
    found = asked(num_return_sequences=2, cache_salt=np.array([["één".encode()]], dtype=object))
    sent = Submission(tuple(each.request for each in found), None, 40).encode()
    assert [request.cache_salt for request in Submission.decode(sent).requests] == ["één", "één"]
    assert [each.request.cache_salt for each in asked()] == [None]


def test_a_salt_of_a_text_model_needs_an_engine_that_takes_it() -> None:
    from responder import RequestFailed
    from text_options import TextOptions  # type: ignore[import-not-found]

    def options(salt: bytes) -> Any:
        return TextOptions.of({"cache_salt": np.array([[salt]], dtype=object)})

    assert (TextOptions.of({}).by_own_channel, options(b"a").by_own_channel) == (None, "cache_salt")
    assert options("é".encode()).engine_inputs()["cache_salt"].tolist() == [["é".encode()]]
    with pytest.raises(RequestFailed, match=r"^cache_salt is empty; leave it out, or give a text$"):
        options(b"")
    with pytest.raises(RequestFailed, match=r"^cache_salt is not UTF-8: byte 0 of 1$"):
        options(b"\xff")


def test_the_engine_learns_whether_tokens_are_streamed() -> None:
    for inputs, streamed in (({}, False), ({"streaming": False}, False), ({"streaming": True}, True)):
        (found,) = asked(**inputs)
        (sent,) = Submission.decode(Submission((found.request,), None, 40).encode()).requests
        assert found.request.streamed is sent.streamed is streamed


def test_biases_may_forbid_tokens() -> None:
    from engine_requests import RequestLimits, requested_sequences
    from responder import RequestFailed

    def biased(value: float) -> tuple[float, ...]:
        bias = np.zeros((1, 100), dtype=np.float32)
        bias[0, 3] = value
        (found,) = requested_sequences(inputs() | {"embedding_bias": bias}, RequestLimits(100, 8, (2,), 4))
        (sent,) = Submission.decode(Submission((found.request,), None, 40).encode()).requests
        return tuple(sent.sampling.embedding_bias)

    assert biased(-np.inf) == (0.0, 0.0, 0.0, -np.inf, *[0.0] * 96)
    for value, shown in ((np.nan, "nan"), (np.inf, "inf")):
        with pytest.raises(RequestFailed, match=f"embedding_bias is {shown}; it must be a finite number, or minus"):
            biased(value)


def test_sequences_of_a_prompt_name_the_first_one() -> None:
    found = asked(num_return_sequences=3, seed=7)
    assert [each.request.copy_of for each in found] == [None, "0", "0"]
    assert [each.request.sampling.seed for each in found] == [7, 8, 9]
    assert [each.request.sampling.seed for each in asked(num_return_sequences=3)] == [None, 1, 2]
    sent = Submission(tuple(each.request for each in found), None, 40).encode()
    assert [request.copy_of for request in Submission.decode(sent).requests] == [None, "0", "0"]


def test_top_p_may_decay() -> None:
    (one,) = asked(runtime_top_p=0.9, runtime_top_p_decay=0.5, runtime_top_p_min=0.25, runtime_top_p_reset_ids=7)
    sampling = one.request.sampling
    assert (sampling.top_p_decay, sampling.top_p_min, sampling.top_p_reset_id) == (0.5, 0.25, 7)
    (plain,) = asked(runtime_top_p=0.9, runtime_top_p_decay=1.0, runtime_top_p_min=0.0)
    sampling = plain.request.sampling
    assert (sampling.top_p_decay, sampling.top_p_min, sampling.top_p_reset_id) == (1.0, 1e-6, -1)
    for given in ({"runtime_top_p_decay": 1.5}, {"runtime_top_p_min": -0.5}, {"runtime_top_p_reset_ids": 100}):
        with pytest.raises(Exception, match=next(iter(given))):
            asked(**given)


@pytest.mark.parametrize(("streaming", "watched"), [(False, True), (True, False)])
def test_only_clients_that_stream_pace_the_embedded_engine(*, streaming: bool, watched: bool) -> None:
    """Stop words are found in pieces of an answer that nobody reads piece by piece."""
    from engine_requests import RequestLimits
    from served_engine import ServedEngine  # type: ignore[import-not-found]

    engine = object.__new__(ServedEngine)
    engine._limits, engine._names = RequestLimits(100, 8, (2,), 1), {}
    engine._client = SimpleNamespace(submit=lambda requests, answer, timeout: requests)
    given = inputs(streaming=streaming)
    (request,) = engine.start(given, None, None, model_end_ids=True, watched=watched)
    assert request.streamed is streaming


@pytest.mark.parametrize("watched", [False, True])
def test_tensorrt_llm_streams_where_pieces_are_watched(*, watched: bool) -> None:
    from triton_engine import TritonEngine  # type: ignore[import-not-found]

    seen: list[dict[str, Any]] = []

    async def run(given: dict[str, Any], receiver: object, timeout: float | None) -> None:
        seen.append(given)

    async def start() -> None:
        engine = object.__new__(TritonEngine)
        engine._loop, engine._run = asyncio.get_running_loop(), run
        await asyncio.wrap_future(
            engine.start(inputs(streaming=False), None, None, model_end_ids=True, watched=watched)
        )

    asyncio.run(start())
    assert [bool(given["streaming"][0, 0]) for given in seen] == [watched]


def test_parameters_are_too_few_to_take_long() -> None:
    from input_names import InputNames  # type: ignore[import-not-found]
    from responder import RequestFailed

    names = InputNames({"text_input", "max_tokens"}, {"top_n": "top_k"})
    names.check({f"own{number}": 1 for number in range(63)} | {"x" * 1_000_000: 1})
    with pytest.raises(RequestFailed, match="max_token is no input of this model; did you mean max_tokens"):
        names.check({"max_token": 1})
    with pytest.raises(RequestFailed, match="the request has 65 parameters; at most 64 are allowed"):
        names.check({f"own{number}": 1 for number in range(65)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"STOP_WORDS_DICT": [b"a" * 1025]}, "STOP_WORDS_DICT is a word of 1025 bytes; it must be at most 1024"),
        (
            {"BAD_WORDS_DICT": [b"a" * 1000] * 17},
            "BAD_WORDS_DICT is 17000 bytes of words; it must be at most 16384 bytes together",
        ),
        (
            {"EMBEDDING_BIAS_WORDS": [b"a" * 1025], "EMBEDDING_BIAS_WEIGHTS": 1.0},
            "EMBEDDING_BIAS_WORDS is a word of 1025 bytes",
        ),
        ({"logit_bias": [b" " * 65537]}, "logit_bias has 65537 characters; at most 65536 are allowed"),
        ({"QUERY": None, "input_ids": [5] * 33}, "the prompt has 33 tokens, this engine takes at most 32"),
    ],
)
def test_what_would_take_long_to_tokenize_is_refused_before(given: dict[str, Any], message: str) -> None:
    from model_config import ModelConfig  # type: ignore[import-not-found]
    from preprocessor import Preprocessor  # type: ignore[import-not-found]
    from responder import RequestFailed

    values = {"tokenizer_dir": str(DEMO_MODEL), "max_input_len": "32", "vocab_size": "2048"}
    parameters = {name: {"string_value": value} for name, value in values.items()}
    config = json.dumps({"parameters": parameters})
    repository = {"model_repository": "", "model_version": "1", "model_name": "preprocessing"}
    preprocessor = Preprocessor(ModelConfig({"model_config": config, **repository}))
    asked = {"QUERY": [b"a file"], "REQUEST_OUTPUT_LEN": 4} | given
    texts = {name: np.array([value], dtype=object) for name, value in asked.items() if given_text(value)}
    others = {name: value for name, value in asked.items() if name not in texts and value is not None}
    with pytest.raises(RequestFailed) as caught:
        preprocessor.prepare(texts | {name: inputs(**{name: value})[name] for name, value in others.items()})
    assert message in str(caught.value)


def given_text(value: object) -> bool:
    return isinstance(value, list) and isinstance(value[0], bytes)
