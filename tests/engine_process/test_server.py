"""Clients and one engine process's server over a real socket; the engine is a fake one that the test drives."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import trtforge.engine_process.server
from tests.patience import PATIENCE, eventually
from trtforge.core.errors import BusyError, ForgeError, RequestError
from trtforge.engine_process.admission import QueueLimits
from trtforge.engine_process.client import EngineClient, Submitted
from trtforge.engine_process.context_phase import ContextPhase, prompt_digest
from trtforge.engine_process.control import EngineControl, EngineUnreachable
from trtforge.engine_process.ended_requests import AdmittedRequest, EndedRequests
from trtforge.engine_process.frames import Frame
from trtforge.engine_process.messages import Update
from trtforge.engine_process.requests import ErrorCode, GenerationRequest, OnOutput, Output, RequestFailure
from trtforge.engine_process.server import EngineServer


class ManualEngine:
    """Does what the test says, on the test's thread."""

    max_running = 2
    worker_pids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.requests: dict[str, tuple[GenerationRequest, OnOutput]] = {}
        self.cancelled: list[tuple[str, bool]] = []
        self.submitted: list[int] = []
        self.failure: ForgeError | None = None
        self.steps = self.preparing = 0
        self.computing = 0  # of the first requests, which do not wait
        self._after: list[Callable[[], None]] = []

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        self.submitted.append(len(requests))
        self.requests.update((request.request_id, (request, on_output)) for request, on_output in requests)

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        self.cancelled.append((request_id, only_waiting))
        if only_waiting and request_id in list(self.requests)[: self.computing]:
            return
        found = self.requests.pop(request_id, None)
        if found is not None:
            found[1](Output(request_id, (), "cancelled"))

    def ping(self, on_turn: Callable[[], None]) -> None:
        on_turn()

    def after_steps(self, on_step: Callable[[], None]) -> None:
        self._after.append(on_step)

    def figures(self) -> dict[str, float]:
        return {"running": min(len(self.requests), 2), "iterations": self.steps, "preparing": self.preparing}

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None: ...

    def step(self, tokens: dict[int, list[int]], finish: str | None = None, error: ForgeError | None = None) -> None:
        """One step: tokens for the n-th running request."""
        self.steps += 1
        keys = list(self.requests)
        for place, made in tokens.items():
            request, on_output = self.requests[keys[place]]
            if finish or error:
                del self.requests[keys[place]]
            on_output(Output(request.request_id, tuple(made), "error" if error else finish, error))  # type: ignore[arg-type]
        for on_step in self._after:
            on_step()


@dataclass
class Kept:
    """A receiver that keeps what it gets."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, object] = field(default_factory=dict)
    frames: int = 0
    submitted: Submitted | None = None

    def take(self, updates: list[tuple[int, Update]]) -> None:
        self.frames += 1
        for place, update in updates:
            self.tokens.setdefault(place, []).extend(update.tokens)
            if update.finish_reason is not None:
                self.ends[place] = update.failure or update.finish_reason


@dataclass
class Place:
    engine: ManualEngine
    path: Path
    server: EngineServer
    thread: threading.Thread
    failures: list[ForgeError | None]


@pytest.fixture
def limits() -> QueueLimits:
    return QueueLimits(size=2)


@pytest.fixture
def place(tmp_path: Path, limits: QueueLimits) -> Iterator[Place]:
    engine, path, failures = ManualEngine(), tmp_path / "engine.sock", []
    server = EngineServer(engine, path, limits)
    thread = threading.Thread(target=lambda: failures.append(server.run()))
    thread.start()
    yield Place(engine, path, server, thread, failures)
    server.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not path.exists()


@pytest.fixture
def client(place: Place) -> Iterator[EngineClient]:
    made = EngineClient(place.path, "ensemble", 1234)
    assert eventually(lambda: bool(EngineControl(place.path).status().clients))
    yield made
    made.close()


def ask(client: EngineClient, count: int = 1, timeout: float | None = None) -> Kept:
    kept = Kept()
    requests = tuple(GenerationRequest("", (1, 2, 3), 9) for _ in range(count))
    kept.submitted = client.submit(requests, kept, timeout)
    return kept


def test_tokens_of_several_requests_come_to_those_who_asked(place: Place, client: EngineClient) -> None:
    first, second = ask(client), ask(client, count=2)
    assert eventually(lambda: len(place.engine.requests) == 3)
    place.engine.step({0: [1], 1: [10], 2: [20]})
    place.engine.step({0: [2], 2: [21]})
    place.engine.step({0: [3], 1: [11], 2: [22]}, finish="length")
    assert eventually(lambda: len(first.ends) == 1 and len(second.ends) == 2)
    assert first.tokens == {0: [1, 2, 3]}
    assert second.tokens == {0: [10, 11], 1: [20, 21, 22]}
    assert second.ends == {0: "length", 1: "length"}
    assert place.engine.submitted == [1, 2], "requests of one submission begin together"
    status = EngineControl(place.path).status()
    assert (status.finished, status.refused, status.generated_tokens, status.running) == (3, 0, 8, 0)
    assert client.unanswered == 0


def test_what_is_too_much_is_refused_at_once_and_as_a_whole(place: Place, client: EngineClient) -> None:
    kept = [ask(client, count=3), ask(client, count=2), ask(client), ask(client)]
    assert eventually(lambda: len(kept[1].ends) == 2 and len(kept[3].ends) == 1)
    assert len(place.engine.requests) == 4
    failure = kept[1].ends[0]
    assert failure.code is ErrorCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert failure.message.startswith("the queue is full: 3 sequences run or wait, at most 4")  # type: ignore[attr-defined]
    assert EngineControl(place.path).status().refused == 3
    assert (kept[0].ends, kept[2].ends) == ({}, {})


def test_a_request_that_is_too_large_for_a_frame_fails_alone(
    place: Place, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ask(client)
    assert eventually(lambda: len(place.engine.requests) == 1)
    monkeypatch.setattr("trtforge.engine_process.frames.LARGEST_HEADER", 1000)
    large = Kept()
    client.submit((GenerationRequest("", (1,), 9, stop_words=((7,) * 1000,)),), large)
    failure = large.ends[0]
    assert isinstance(failure, RequestFailure)
    assert failure.code is ErrorCode.INVALID_ARGUMENT
    assert failure.message.startswith("the request is too large for the engine: frame too large: 2")
    place.engine.step({0: [1]}, finish="length")
    assert eventually(lambda: kept.ends == {0: "length"})


def test_a_client_that_leaves_ends_its_requests_only(place: Place, client: EngineClient) -> None:
    other = EngineClient(place.path, "tensorrt_llm_bls", 99)
    assert eventually(lambda: len(EngineControl(place.path).status().clients) == 2)
    stays, leaves = ask(client), None
    assert eventually(lambda: len(place.engine.requests) == 1)
    leaves = ask(other, count=2)
    assert eventually(lambda: len(place.engine.requests) == 3)
    other.close()
    assert eventually(lambda: len(place.engine.requests) == 1)
    place.engine.step({0: [5]}, finish="length")
    assert eventually(lambda: stays.ends == {0: "length"})
    assert all(end.code is ErrorCode.UNAVAILABLE for end in leaves.ends.values())  # type: ignore[attr-defined]


def test_what_is_sent_together_keeps_its_order(place: Place, client: EngineClient) -> None:
    kept = [Kept() for _ in range(3)]
    with client.together():
        submitted = [client.submit((GenerationRequest("", (1,), 9),), each) for each in kept]
        client.cancel(submitted[1])
        time.sleep(0.05)
        assert place.engine.requests == {}
    assert eventually(lambda: kept[1].ends == {0: "cancelled"})
    assert len(place.engine.requests) == 2


def test_what_is_sent_together_to_nobody_is_refused(tmp_path: Path) -> None:
    alone, kept, answers = EngineClient(tmp_path / "nobody.sock", "x", 1), Kept(), list[object]()
    with alone.together():
        alone.submit((GenerationRequest("", (1,), 9), GenerationRequest("", (1,), 9)), kept)
        alone.ping(answers.append)
    alone.close()
    assert [end.code for end in kept.ends.values()] == [ErrorCode.UNAVAILABLE] * 2  # type: ignore[attr-defined]
    assert len(answers) == 1


def test_a_cancelled_request_ends_as_it_stands(place: Place, client: EngineClient) -> None:
    kept = Kept()
    submitted = client.submit((GenerationRequest("", (1,), 9),), kept)
    assert eventually(lambda: len(place.engine.requests) == 1)
    client.cancel(submitted)
    assert eventually(lambda: kept.ends == {0: "cancelled"})
    client.cancel(submitted)
    assert EngineControl(place.path).status().running == 0


def test_a_sequence_may_end_while_its_cancellation_is_handled(place: Place, client: EngineClient) -> None:
    class EndsWhenLookedFor(dict[str, object]):
        """The engine's thread removes a finished sequence between two statements of the server's thread."""

        def __contains__(self, key: object) -> bool:
            return self.pop(str(key), None) is not None

    submitted = client.submit((GenerationRequest("", (1,), 9),), Kept())
    assert eventually(lambda: len(place.engine.requests) == 1)
    place.server._sequences = EndsWhenLookedFor(place.server._sequences)  # type: ignore[assignment]
    client.cancel(submitted)
    assert eventually(lambda: len(place.engine.cancelled) == 1)
    assert EngineControl(place.path).status().state == "serving"


def test_an_error_of_a_request_is_an_invalid_argument_and_one_of_the_engine_ends_all(
    place: Place, client: EngineClient
) -> None:
    first, second = ask(client), ask(client)
    assert eventually(lambda: len(place.engine.requests) == 2)
    place.engine.step({0: []}, error=RequestError("the prompt is too long", hint="Shorten it."))
    assert eventually(lambda: len(first.ends) == 1)
    assert first.ends[0].code is ErrorCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert first.ends[0].message == "the prompt is too long. Shorten it."  # type: ignore[attr-defined]
    assert second.ends == {}
    place.engine.failure = ForgeError("rank 1 ended: out of memory", hint="Lower max_batch_size.")
    assert eventually(lambda: len(second.ends) == 1)
    said = "the engine ended: rank 1 ended: out of memory (hint: Lower max_batch_size.)"
    assert second.ends[0].message == said  # type: ignore[attr-defined]
    assert EngineControl(place.path).status().state == "failed"
    late = ask(client)
    assert eventually(lambda: len(late.ends) == 1)
    assert late.ends[0].message == said  # type: ignore[attr-defined]
    place.thread.join(PATIENCE)
    assert place.failures == [place.engine.failure]


def test_a_deadline_ends_a_request_even_if_the_engine_does_nothing(place: Place, client: EngineClient) -> None:
    kept = ask(client, timeout=0.05)
    assert eventually(lambda: len(kept.ends) == 1)
    assert kept.ends[0].code is ErrorCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]


def test_refusals_and_passed_deadlines_are_counted_in_the_figures(place: Place, client: EngineClient) -> None:
    seen: list[Mapping[str, float]] = [{}]
    watching = EngineClient(place.path, "tensorrt_llm", 1, figures_period=0.01, on_figures=seen.append)
    invalid, late = ask(client, count=50), ask(client, timeout=0.05)
    assert eventually(lambda: len(invalid.ends) == 50 and len(late.ends) == 1)
    busy = [ask(client, count=2), ask(client, count=2), ask(client, count=3)]
    assert eventually(lambda: len(busy[2].ends) == 3)
    names = ("invalid_requests", "refused_requests", "late_requests")
    assert eventually(lambda: [seen[-1].get(name) for name in names] == [1, 1, 1])
    for each in busy[:2]:
        assert each.submitted is not None
        client.cancel(each.submitted)
    assert eventually(lambda: all(len(each.ends) == 2 for each in busy[:2]))
    assert seen[-1]["running"] == 0
    watching.close()


def test_requests_are_counted_by_their_ends(place: Place, client: EngineClient) -> None:
    kept = [ask(client) for _ in range(4)]
    assert eventually(lambda: len(place.engine.requests) == 4)
    place.engine.step({0: [7]}, finish="length")
    place.engine.step({0: [7]}, error=RequestError("there is no adapter 7", hint="Name another."))
    place.engine.step({0: [7]}, error=BusyError("no room for adapter 7", hint="Later."))
    place.engine.step({0: [7]}, error=ForgeError("a rank has ended", hint="Start the server again."))
    assert eventually(lambda: all(len(each.ends) == 1 for each in kept))
    ended = place.server._ended
    assert (ended.answered, ended.refused, ended.invalid, ended.late, ended.failed) == (1, 1, 1, 0, 1)


def test_a_request_of_several_sequences_is_one_and_ends_with_the_last(place: Place, client: EngineClient) -> None:
    ended = place.server._ended
    kept = ask(client, count=3)
    assert eventually(lambda: len(place.engine.requests) == 3)
    for _ in range(3):
        assert ended.answered == 0
        place.engine.step({0: [7]}, finish="length")
    assert eventually(lambda: len(kept.ends) == 3)
    assert ended.answered == 1
    mixed = [ask(client, count=2), ask(client, count=2)]
    assert eventually(lambda: len(place.engine.requests) == 4)
    place.engine.step({0: [7]}, error=RequestError("there is no adapter 7", hint="Name another."))
    place.engine.step({0: [7]}, finish="length")
    place.engine.step({0: [7]}, finish="cancelled")
    place.engine.step({0: [7]}, finish="length")
    assert eventually(lambda: all(len(each.ends) == 2 for each in mixed))
    assert (ended.answered, ended.invalid, ended.refused, ended.late, ended.failed) == (1, 1, 0, 0, 0)


def test_the_seconds_of_a_request_are_those_until_its_last_sequence_ends() -> None:
    ended, request = EndedRequests(), AdmittedRequest(3, 100.0)
    for now in (101.0, 102.0, 104.0):
        ended.end_sequence(request, "answered", now)
    assert (ended.answered, ended.seconds) == (1, 4.0)


def test_parts_of_a_request_are_counted_by_their_client(place: Place, client: EngineClient) -> None:
    """As those of a request whose tokens another engine drafts."""
    kept = Kept()
    for counted in ("nothing", "failures"):
        client.submit((GenerationRequest("", (1,), 9),), kept, None, counted)
        assert eventually(lambda: len(place.engine.requests) == 1)
        place.engine.step({0: [7]}, finish="length")
    client.submit(tuple(GenerationRequest("", (1,), 9) for _ in range(50)), kept, None, "nothing")
    client.submit(tuple(GenerationRequest("", (1,), 9) for _ in range(50)), kept, None, "failures")
    client.count_answered(2.5)
    ended = place.server._ended
    assert eventually(lambda: ended.answered == 1)
    assert (ended.seconds, ended.invalid, ended.refused) == (2.5, 1, 0)


@pytest.mark.parametrize("limits", [QueueLimits(size=500)])
def test_deadlines_of_requests_that_are_over_are_dropped(place: Place, client: EngineClient) -> None:
    for _ in range(5):
        kept = Kept()
        submitted = client.submit(tuple(GenerationRequest("", (1,), 9) for _ in range(300)), kept, 3600.0)
        client.cancel(submitted)
        assert eventually(lambda kept=kept: len(kept.ends) == 300)
    assert len(place.server._deadlines) < 1400


@pytest.mark.parametrize("limits", [QueueLimits(seconds=0.05)])
def test_a_request_that_waits_too_long_is_refused(place: Place, client: EngineClient) -> None:
    kept = ask(client)
    assert eventually(lambda: len(kept.ends) == 1)
    assert kept.ends[0].message.startswith("the request waited 0.05 s in the queue; retry in ")  # type: ignore[attr-defined]
    assert [only_waiting for _, only_waiting in place.engine.cancelled] == [True]


@pytest.mark.parametrize("limits", [QueueLimits(seconds=0.05)])
def test_requests_that_only_compute_their_prompts_are_not_late(place: Place, client: EngineClient) -> None:
    seen: list[Mapping[str, float]] = [{}]
    watching = EngineClient(place.path, "tensorrt_llm", 1, figures_period=0.01, on_figures=seen.append)
    place.engine.computing = 1
    computes, waits = ask(client), ask(client)
    assert eventually(lambda: len(waits.ends) == 1 and len(place.engine.cancelled) == 2)
    assert len(place.engine.requests) == 1
    place.engine.step({0: [7]}, finish="length")
    assert eventually(lambda: computes.ends == {0: "length"})
    assert eventually(lambda: (seen[-1].get("late_requests"), seen[-1].get("answered_requests")) == (1, 1))
    assert 0 < seen[-1]["answered_seconds"] < PATIENCE
    count = len(seen)
    assert eventually(lambda: len(seen) > count + 2)
    assert seen[-1]["late_requests"] == 1
    watching.close()


def test_requests_of_different_lengths_leave_no_bytes_behind(place: Place, client: EngineClient) -> None:
    kept = Kept()
    client.submit((GenerationRequest("", (1, 2, 3, 4), 9), GenerationRequest("", (1,), 9)), kept)
    assert eventually(lambda: len(place.engine.requests) == 2)
    assert place.server._admission.bytes == 20
    place.engine.step({0: [1], 1: [1]}, finish="length")
    assert eventually(lambda: len(kept.ends) == 2)
    assert (place.server._admission.sequences, place.server._admission.bytes) == (0, 0)


def test_a_request_that_can_be_served_later_is_told_when(place: Place, client: EngineClient) -> None:
    kept = ask(client)
    assert eventually(lambda: len(place.engine.requests) == 1)
    place.engine.step({0: []}, error=BusyError("all adapters are in use", hint="Send it again later."))
    assert eventually(lambda: len(kept.ends) == 1)
    assert kept.ends[0].code is ErrorCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert kept.ends[0].message == "all adapters are in use; retry in 1 s"  # type: ignore[attr-defined]


def test_what_is_prepared_elsewhere_is_no_stall(
    place: Place, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtforge.engine_process.server, "cpu_seconds", lambda processes: 0.0)
    control = EngineControl(place.path)
    ask(client, count=2)
    assert eventually(lambda: control.status().stalled_seconds > 0.3)
    place.engine.preparing = 1
    assert control.status().stalled_seconds > 0.3, "the other request does not run"
    place.engine.preparing = 2
    assert eventually(lambda: control.status().stalled_seconds == 0.0)


def test_a_first_token_that_a_request_brings_does_not_end_its_wait(place: Place, client: EngineClient) -> None:
    """The engine hands it out at once; only the second one shows that the request runs."""
    kept = Kept()
    phase = ContextPhase(7, prompt_digest([1]))
    client.submit((GenerationRequest("", (1,), 9, context_phase=phase), GenerationRequest("", (1,), 9)), kept)
    assert eventually(lambda: len(place.engine.requests) == 2)
    brings, other = place.server._sequences.values()
    place.engine.step({0: [7], 1: [7]})
    assert (brings.started, other.started) == (False, True)
    place.engine.step({0: [8]})
    place.engine.step({0: [9]})
    assert brings.started
    place.engine.step({0: [10]}, finish="length")
    assert eventually(lambda: kept.ends == {0: "length"})
    assert kept.tokens[0] == [7, 8, 9, 10]


def test_draining_refuses_new_requests_and_cutting_ends_the_rest(place: Place, client: EngineClient) -> None:
    running = ask(client)
    assert eventually(lambda: len(place.engine.requests) == 1)
    control = EngineControl(place.path)
    control.drain()
    late = ask(client)
    assert eventually(lambda: len(late.ends) == 1)
    assert "shutting down" in late.ends[0].message  # type: ignore[attr-defined]
    assert (control.status().state, running.ends) == ("draining", {})
    assert control.cut("the server was stopped") == 1
    assert eventually(lambda: len(running.ends) == 1)
    assert running.ends[0].message == "the server was stopped"  # type: ignore[attr-defined]
    assert (control.status().cut, control.cut("again")) == (1, 0)


def test_a_client_that_reads_nothing_keeps_nobody_waiting(place: Place, client: EngineClient) -> None:
    """Its updates are merged: what it takes is bounded by its requests, not by their tokens."""
    from trtforge.engine_process.messages import Submission

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(place.path))
        silent.sendall(Submission((GenerationRequest("1", (1,), 10**6),)).encode().encode())
        assert eventually(lambda: len(place.engine.requests) == 1)
        other = ask(client)
        assert eventually(lambda: len(place.engine.requests) == 2)
        for _ in range(300):
            place.engine.step({0: [7] * 2000, 1: [8]})
        place.engine.step({1: [9]}, finish="length")
        assert eventually(lambda: other.ends == {0: "length"})
        assert other.tokens[0] == [8] * 300 + [9]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 3,
        Frame({"type": "cancel"}).encode(),
        Frame({"type": "beat", "unanswered": "2"}).encode(),
        Frame({"type": "hello", "name": "a"}).encode(),
        Frame({"type": "hello", "name": "a", "pid": 1, "figures_period": "1"}).encode(),
        Frame({"type": "drain"}).encode(),
        Frame({"type": "cut", "number": 1}).encode(),
    ],
    ids=["http", "cancel", "beat", "hello", "period", "drain", "cut"],
)
def test_what_is_no_protocol_loses_its_connection_only(sent: bytes, place: Place, client: EngineClient) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(place.path))
        stranger.sendall(sent)
        stranger.settimeout(PATIENCE)
        assert stranger.recv(10) == b""
    kept = ask(client)
    assert eventually(lambda: len(place.engine.requests) == 1)
    place.engine.step({0: [1]}, finish="length")
    assert eventually(lambda: kept.ends == {0: "length"})


def test_a_ping_comes_back_and_says_when_nobody_is_there(place: Place, client: EngineClient, tmp_path: Path) -> None:
    answers: list[object] = []
    client.ping(answers.append)
    assert eventually(lambda: answers == [None])
    alone = EngineClient(tmp_path / "nobody.sock", "x", 1)
    alone.ping(answers.append)
    kept = ask(alone)
    alone.close()
    assert answers[1].code is ErrorCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert "retry in" in kept.ends[0].message  # type: ignore[attr-defined]
    with pytest.raises(EngineUnreachable):
        EngineControl(tmp_path / "nobody.sock").status()


def test_a_copy_names_its_original_as_the_engine_knows_it(place: Place, client: EngineClient) -> None:
    for _ in range(2):
        copies = (GenerationRequest("", (1, 2), 9), GenerationRequest("", (1, 2), 9, copy_of="0"))
        client.submit(copies, Kept())
    assert eventually(lambda: len(place.engine.requests) == 4)
    found = [request for request, _ in place.engine.requests.values()]
    assert [request.copy_of for request in found] == [None, found[0].request_id, None, found[2].request_id]
