"""Frames survive any cut of the byte stream, and nothing else is taken for one."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.engine_process.frames import BadFrame, Frame, FrameReader
from trtforge.engine_process.messages import Submission, Update, decode_updates, encode_updates
from trtforge.engine_process.requests import (
    GUIDE_KINDS,
    DraftTokens,
    ErrorCode,
    GenerationRequest,
    Guide,
    Output,
    PromptLogProbs,
    RequestFailure,
    SamplingParams,
)

TOKENS = st.integers(0, 2**31 - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
REQUESTS = st.builds(
    GenerationRequest,
    request_id=st.integers(0, 2**40).map(str),
    prompt=st.lists(TOKENS, max_size=30).map(tuple),
    max_tokens=st.integers(1, 2**31 - 1),
    sampling=st.builds(
        SamplingParams,
        temperature=st.none() | FLOATS,
        top_k=st.none() | st.integers(0, 100),
        top_p=st.none() | FLOATS,
        seed=st.none() | st.integers(0, 2**64 - 1),
        return_log_probs=st.booleans(),
        embedding_bias=st.lists(FLOATS, max_size=5).map(tuple),
    ),
    guide=st.none() | st.builds(Guide, st.sampled_from(GUIDE_KINDS), st.text(max_size=20)),
    end_ids=st.frozensets(TOKENS, max_size=3),
    stop_words=WORDS,
    bad_words=WORDS,
    drafts=st.none()
    | st.builds(
        DraftTokens,
        tokens=st.lists(TOKENS, max_size=5).map(tuple),
        logits=st.binary(max_size=20),
        threshold=st.floats(0, 1),
        alone=st.booleans(),
    ),
)


@given(
    frames=st.lists(st.tuples(st.dictionaries(st.text(max_size=5), st.integers(), max_size=4), st.binary(max_size=50))),
    cuts=st.lists(st.integers(1, 40)),
)
def test_frames_come_out_as_they_went_in_however_the_bytes_arrive(
    frames: list[tuple[dict[str, int], bytes]], cuts: list[int]
) -> None:
    data = b"".join(Frame(header, payload).encode() for header, payload in frames)
    reader, found, start = FrameReader(), [], 0
    for cut in [*cuts, len(data) + 1]:
        found += list(reader.feed(data[start : start + cut]))
        start += cut
    assert [(frame.header, frame.payload) for frame in found] == frames


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (struct.pack("<II", 2**31, 0), "frame too large: 2147483648"),
        (struct.pack("<II", 2, 2**31), "frame too large: 2"),
        (struct.pack("<II", 3, 0) + b"{x}", "not JSON"),
        (struct.pack("<II", 2, 0) + b"[]", "not an object"),
        (struct.pack("<II", 200_000, 0) + b"[" * 200_000, "not JSON"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadFrame, match=said):
        list(FrameReader().feed(data))


@given(requests=st.lists(REQUESTS, min_size=1, max_size=4).map(tuple), timeout=st.none() | st.floats(0.001, 1e6))
def test_requests_arrive_as_they_were_sent(requests: tuple[GenerationRequest, ...], timeout: float | None) -> None:
    (frame,) = FrameReader().feed(Submission(requests, timeout, 7).encode().encode())
    found = Submission.decode(frame)
    assert found.timeout == timeout
    for before, after in zip(requests, found.requests, strict=True):
        bias = tuple(after.sampling.embedding_bias)
        assert bias == before.sampling.embedding_bias
        assert (before.prompt, before.guide, before.drafts) == (after.prompt, after.guide, after.drafts)
        assert (before.end_ids, before.stop_words, before.bad_words) == (
            after.end_ids,
            after.stop_words,
            after.bad_words,
        )
        assert before.max_tokens == after.max_tokens
        assert replace(before.sampling, embedding_bias=()) == replace(after.sampling, embedding_bias=())
    assert [request.request_id for request in found.requests] == [str(7 + place) for place in range(len(requests))]


@given(requests=st.lists(REQUESTS, min_size=1, max_size=2), seeds=st.lists(st.none() | st.integers(0, 9), max_size=3))
def test_copies_arrive_as_they_were_sent_and_cost_little(
    requests: list[GenerationRequest], seeds: list[int | None]
) -> None:
    last = replace(requests[-1], guide=Guide("regex", "a" * 1000))
    place = str(len(requests) - 1)
    copies = [replace(last, copy_of=place, sampling=replace(last.sampling, seed=seed)) for seed in seeds]
    sent = [*requests[:-1], last, *copies, replace(last, copy_of=place, max_tokens=7)]
    frame = Submission(tuple(sent), None, 0).encode()
    assert frame.encode().count(b"a" * 1000) == 1 + (last.max_tokens != 7)
    found = Submission.decode(frame).requests
    for number, (before, after) in enumerate(zip(sent, found, strict=True)):
        bias = tuple(after.sampling.embedding_bias)
        assert replace(after, sampling=replace(after.sampling, embedding_bias=bias)) == replace(
            before, request_id=str(number)
        )


READABLE = {"id": 1, "prompt": 1, "bias": 0, "max_tokens": 1, "sampling": {}}
READABLE |= {"end_ids": [], "stop_words": [], "bad_words": []}


@pytest.mark.parametrize(
    "header",
    [
        {"requests": [READABLE | {"id": "a"}]},
        {"requests": [READABLE | {"id": None}]},
        {"requests": [READABLE], "timeout": "soon"},
        {"requests": [READABLE], "timeout": [1]},
    ],
)
def test_a_name_or_timeout_that_is_no_number_is_a_bad_frame(header: dict[str, object]) -> None:
    assert Submission.decode(Frame({"requests": [READABLE], "timeout": 2}, b"1234")).timeout == 2.0
    with pytest.raises(BadFrame, match="a request that cannot be read"):
        Submission.decode(Frame(header, b"1234"))


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"id": 1, "prompt": 5, "bias": 0},
        {"id": 1, "prompt": -1, "bias": 0},
        {"id": 1, "prompt": 0, "bias": 0, "max_tokens": 1, "sampling": {"unknown": 1}},
        {"id": 1, "copy_of": 0, "seed": None},
    ],
)
def test_a_request_that_cannot_be_read_is_a_bad_frame(row: dict[str, object]) -> None:
    with pytest.raises(BadFrame, match="a request that cannot be read"):
        Submission.decode(Frame({"type": "submit", "requests": [row]}, b"1234"))


def test_updates_arrive_as_they_were_sent() -> None:
    running = Update([1, 2], [-0.5, -0.25], None, -0.75, 1, 3, 17)
    failed = Update([7], finish_reason="error", failure=RequestFailure(ErrorCode.UNAVAILABLE, "full"))
    found = decode_updates(encode_updates({4: running, 5: failed}))
    assert (found[4].tokens, list(found[4].log_probs), found[4].cumulative_log_prob) == ([1, 2], [-0.5, -0.25], -0.75)
    assert (found[4].reused_blocks, found[4].allocated_blocks, found[4].finish_reason) == (1, 3, None)
    assert (found[4].cached_tokens, found[5].cached_tokens) == (17, None)
    assert (found[5].tokens, found[5].failure) == ([7], failed.failure)


def test_detailed_log_probs_arrive_as_they_were_sent() -> None:
    prompt = PromptLogProbs((-1.0, -2.0), (((5, -0.1),), ((6, -0.2),)))
    detailed = Update([1], [-0.5], top_log_probs=[((1, -0.5), (2, -0.75))], prompt_log_probs=prompt)
    (frame,) = FrameReader().feed(encode_updates({4: detailed, 5: Update([2])}).encode())
    found = decode_updates(frame)
    assert found[4].top_log_probs == [[[1, -0.5], [2, -0.75]]]
    assert found[4].prompt_log_probs == PromptLogProbs([-1.0, -2.0], [[[5, -0.1]], [[6, -0.2]]])
    assert (found[5].top_log_probs, found[5].prompt_log_probs) == ([], None)


def test_counts_of_drafts_arrive_and_the_later_ones_hold() -> None:
    found = decode_updates(encode_updates({4: Update([1, 2], drafted_tokens=5, accepted_tokens=1), 5: Update([2])}))
    found[4].merge(Update([3], drafted_tokens=8, accepted_tokens=3))
    assert (found[4].tokens, found[4].drafted_tokens, found[4].accepted_tokens) == ([1, 2, 3], 8, 3)
    assert (found[5].drafted_tokens, found[5].accepted_tokens) == (0, 0)


def test_the_last_update_says_when_its_sequence_first_ran() -> None:
    updates = {4: Update([1], scheduled_ns=7), 5: Update([2], finish_reason="length", scheduled_ns=9)}
    found = decode_updates(encode_updates(updates))
    assert (found[4].scheduled_ns, found[5].scheduled_ns) == (0, 9)
    found[4].merge(found[5])
    assert found[4].scheduled_ns == 9


@given(st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=8), st.integers(0, 7))
def test_merged_updates_tell_what_the_single_ones_told(steps: list[list[int]], cut: int) -> None:
    updates = [Update(), Update()]
    total = 0.0
    for number, tokens in enumerate(steps):
        total -= len(tokens)
        last = "length" if number == len(steps) - 1 else None
        output = Output("1", tuple(tokens), last, log_probs=(-1.0,) * len(tokens), cumulative_log_prob=total)  # type: ignore[arg-type]
        updates[number >= cut].add(output)
    if cut < len(steps):
        updates[0].merge(updates[1])
    assert updates[0].tokens == [token for tokens in steps for token in tokens]
    assert updates[0].cumulative_log_prob == total
    assert updates[0].finish_reason == "length"
