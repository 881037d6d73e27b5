"""The server of the engine process: one engine, several clients on a Unix domain socket.

One thread reads from all clients and checks deadlines; the engine's thread sends outputs, a frame per client and step.
"""

import heapq
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trtforge.core.errors import BusyError, ForgeError, RequestError
from trtforge.core.server_errors import SHUTTING_DOWN
from trtforge.engine_process.admission import Admission, AdmittedSequence, QueueLimits
from trtforge.engine_process.connection import Connection
from trtforge.engine_process.control import ClientStatus, EngineStatus, State
from trtforge.engine_process.ended_requests import AdmittedRequest, End, EndedRequests, end_of
from trtforge.engine_process.frames import BadFrame, Frame
from trtforge.engine_process.messages import Submission, Update, size_of
from trtforge.engine_process.progress import Progress, cpu_seconds
from trtforge.engine_process.requests import (
    ErrorCode,
    GenerationRequest,
    OnOutput,
    Output,
    RequestEngine,
    RequestFailure,
)

_LOG = logging.getLogger(__name__)
_TICK = 0.1  # seconds between checks of deadlines and processes
_FAILED_PERIOD = 2.0  # seconds for which a failed engine still answers
_BACKLOG = 64
_SPARE_DEADLINES = 1024  # deadlines of finished sequences that may be kept


class EngineServer:
    """Serves `engine` at `path` until `stop`, or until it fails."""

    def __init__(self, engine: RequestEngine, path: Path, limits: QueueLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._admission = Admission(limits, engine.max_running)
        self._lock = threading.Lock()
        self._sequences: dict[str, AdmittedSequence] = {}
        self._clients: dict[int, Connection] = {}
        self._deadlines: list[tuple[float, int, str, bool]] = []
        self._timers = 0
        self._state: State = "serving"
        self._failure: ForgeError | None = None
        self._failed_at = 0.0
        self._stopping = False
        self._tokens = self._finished = self._refused = self._cut = 0
        self._ended = EndedRequests()
        self._progress = Progress(time.monotonic())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._path = path
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        engine.after_steps(self._flush)

    def run(self) -> ForgeError | None:
        """Serve. Returns None when stopped, and the error when the engine failed."""
        tick_at = 0.0
        try:
            while not self._stopping:
                for key, events in self._selector.select(max(0.0, tick_at - time.monotonic())):
                    self._handle(key.fileobj, events)
                now = time.monotonic()
                if now >= tick_at:
                    self._tick(now)
                    tick_at = now + _TICK
                if self._failure is not None and now > self._failed_at + _FAILED_PERIOD:
                    break
        finally:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            for client in self._clients.values():
                client.close()
        return self._failure

    def stop(self) -> None:
        """Make `run` return. May be called from any thread, or a signal handler."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"x")
        except BlockingIOError:
            return  # a wake-up is already pending

    def _handle(self, source: object, events: int) -> None:
        if source is self._listener:
            self._accept()
        elif source is self._wake_receiver:
            self._wake_receiver.recv(4096)
            for client in self._clients.values():
                if client.wants_write:
                    self._selector.modify(client.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
        else:
            assert isinstance(source, socket.socket)
            client = self._selector.get_key(source).data
            if events & selectors.EVENT_WRITE:
                client.on_writable()
                if not client.wants_write:
                    self._selector.modify(client.sock, selectors.EVENT_READ, client)
            if events & selectors.EVENT_READ:
                self._read(client)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        client = Connection(sock, self._timers, self._wake)
        self._timers += 1
        self._clients[client.number] = client
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _read(self, client: Connection) -> None:
        try:
            frames = client.receive()
            for frame in frames or ():
                self._take(client, frame)
        except BadFrame as error:
            _LOG.error("%s: %s", client.name or "a client", error)
            frames = None
        if frames is None:
            self._disconnect(client)

    def _disconnect(self, client: Connection) -> None:
        self._selector.unregister(client.sock)
        del self._clients[client.number]
        client.close()
        with self._lock:
            left = [sequence for sequence in self._sequences.values() if sequence.client is client]
        for sequence in left:
            self._end(sequence, RequestFailure(ErrorCode.CANCELLED, "the client disconnected"), "cancelled")

    def _take(self, client: Connection, frame: Frame) -> None:
        match frame.header.get("type"):
            case "submit":
                self._submit(client, Submission.decode(frame))
            case "cancel":
                for key in (_key(client, name) for name in frame.field("names", list)):
                    sequence = self._sequences.get(key)  # the engine's thread may end it at any time
                    if sequence is not None:
                        sequence.failure = None  # a limit of the queue that passed while it ran
                    self._engine.cancel(key)
            case "answered":
                with self._lock:
                    self._ended.answer(frame.field("seconds", float))
            case "beat":
                client.unanswered, client.beat_at = frame.field("unanswered", int), time.monotonic()
            case "hello":
                client.name, client.pid = frame.field("name", str), frame.field("pid", int)
                wanted = frame.header.get("figures_period") is not None
                client.figures_period = frame.field("figures_period", float) if wanted else None
            case "ping":
                number = frame.field("number", int)
                self._engine.ping(lambda: client.send(Frame({"type": "pong", "number": number})))
            case "status":
                answer = {"type": "status", "number": frame.field("number", int), "status": self._status().encode()}
                client.send(Frame(answer))
            case "drain":
                number = frame.field("number", int)
                self._state = "draining" if self._state == "serving" else self._state
                client.send(Frame({"type": "drain", "number": number}))
            case "cut":
                number, reason = frame.field("number", int), frame.field("reason", str)
                cut = self._cut_all(RequestFailure(ErrorCode.UNAVAILABLE, reason))
                client.send(Frame({"type": "cut", "number": number, "cut": cut}))
            case other:
                raise BadFrame(f"unknown frame type {other!r}")

    def _submit(self, client: Connection, submission: Submission) -> None:
        now = time.monotonic()
        failure = self._closed()
        sequences = []
        with self._lock:
            failure = failure or self._admission.refuse(submission, now)
            if failure is None:
                whole = AdmittedRequest(len(submission.requests), now, submission.counted)
                for request in submission.requests:
                    key = _key(client, request.request_id)
                    brought = request.context_phase is not None
                    name, size = int(request.request_id), size_of(request)
                    sequence = AdmittedSequence(client, name, key, size, whole, brought=brought)
                    self._sequences[key] = sequence
                    sequences.append((sequence, request))
                    if submission.timeout is not None:
                        self._add_deadline(now + submission.timeout, key, only_waiting=False)
                    if self._limits.seconds is not None:
                        self._add_deadline(now + self._limits.seconds, key, only_waiting=True)
            else:
                self._refused += len(submission.requests)
                self._ended.refuse(failure, submission.counted)
        if failure is not None:
            for request in submission.requests:
                client.add(int(request.request_id), Update(finish_reason="error", failure=failure), urgent=True)
            client.flush()
            return
        self._engine.submit(*(self._named(submission.first, *each) for each in sequences))

    def _named(
        self, first: int, sequence: AdmittedSequence, request: GenerationRequest
    ) -> tuple[GenerationRequest, OnOutput]:
        """A request with the engine's ids, and the receiver of its outputs. `first`: of its client's submission."""
        original = None if request.copy_of is None else _key(sequence.client, first + int(request.copy_of))
        named = replace(request, request_id=sequence.key, copy_of=original)
        return named, lambda output: self._on_output(sequence, output)

    def _closed(self) -> RequestFailure | None:
        """Why all submissions are refused; None while serving."""
        if self._failure is not None:
            return _failed(self._failure)
        if self._state == "draining":
            return RequestFailure(ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        return None

    def _on_output(self, sequence: AdmittedSequence, output: Output) -> None:
        """Pass an output to the client; runs on the engine's thread."""
        with self._lock:
            if sequence.done:
                return
            urgent = not sequence.started or output.finish_reason is not None
            sequence.started, sequence.brought = not sequence.brought, False
            self._tokens += len(output.tokens)
            failure = None
            if output.error is not None:
                failure = self._failure_of(output.error)
            elif output.finish_reason == "cancelled":
                failure = sequence.failure
            if output.finish_reason is not None:
                self._finish(sequence, end_of(output, expired=failure is not None))
        update = Update()
        update.add(output)
        update.failure = failure
        sequence.client.add(sequence.name, update, urgent=urgent)
        if output.error is not None and not isinstance(output.error, RequestError):
            self._fail(output.error)

    def _failure_of(self, error: ForgeError) -> RequestFailure:
        """The failure reported to a client for its request's error or the engine's."""
        if isinstance(error, BusyError):
            retry = self._admission.retry_seconds(time.monotonic())
            return RequestFailure(ErrorCode.UNAVAILABLE, f"{error.message}; retry in {retry} s")
        return _refusal(error) if isinstance(error, RequestError) else _failed(error)

    def _finish(self, sequence: AdmittedSequence, end: End) -> None:
        """Forget a sequence. The caller holds the lock."""
        now = time.monotonic()
        sequence.done = True
        self._sequences.pop(sequence.key, None)
        self._admission.end(sequence.size, now)
        self._ended.end_sequence(sequence.request, end, now)
        self._finished += 1

    def _end(self, sequence: AdmittedSequence, failure: RequestFailure, end: End) -> bool:
        """End a sequence with an error now, without waiting for the engine; False if it had already ended."""
        with self._lock:
            if sequence.done:
                return False
            self._finish(sequence, end)
        sequence.client.add(sequence.name, Update(finish_reason="error", failure=failure), urgent=True)
        self._engine.cancel(sequence.key)
        return True

    def _cut_all(self, failure: RequestFailure) -> int:
        with self._lock:
            left = list(self._sequences.values())
        cut = sum(self._end(sequence, failure, "failed") for sequence in left)
        self._cut += cut
        self._flush()
        return cut

    def _fail(self, error: ForgeError) -> None:
        if self._failure is None:
            self._failure, self._failed_at, self._state = error, time.monotonic(), "failed"
            _LOG.error("the engine ended: %s (hint: %s)", error.message, error.hint)

    def _flush(self) -> None:
        """Send the clients' updates; also called after each step, on the engine's thread."""
        for client in tuple(self._clients.values()):
            client.flush()

    def _add_deadline(self, when: float, key: str, *, only_waiting: bool) -> None:
        self._timers += 1
        heapq.heappush(self._deadlines, (when, self._timers, key, only_waiting))
        if len(self._deadlines) > 2 * len(self._sequences) + _SPARE_DEADLINES:
            self._deadlines = [each for each in self._deadlines if each[2] in self._sequences]
            heapq.heapify(self._deadlines)

    def _tick(self, now: float) -> None:
        with self._lock:
            due = list(self._due(now))
            unfinished = len(self._sequences)
        for sequence, only_waiting in due:
            if not only_waiting:
                failure = RequestFailure(ErrorCode.DEADLINE_EXCEEDED, "the request's timeout has passed")
                self._end(sequence, failure, "late")
            elif not sequence.started:  # ends only if it waits
                waited = f"the request waited {self._limits.seconds:g} s in the queue; retry in "
                sequence.failure = RequestFailure(
                    ErrorCode.UNAVAILABLE, f"{waited}{self._admission.retry_seconds(now)} s"
                )
                self._engine.cancel(sequence.key, only_waiting=True)
        if self._failure is None:
            try:
                self._engine.check()
            except ForgeError as error:
                self._fail(error)
                self._cut_all(_failed(error))
        figures = self._engine.figures()
        processes = (os.getpid(), *self._engine.worker_pids)
        self._progress.sample(
            now,
            steps=figures.get("iterations", 0) + self._tokens,
            unfinished=max(0, unfinished - int(figures.get("preparing", 0))),  # compilations have limits of their own
            cpu_seconds=cpu_seconds(processes),
        )
        self._send_figures(now, {**figures, **self._ended.figures()})
        self._flush()

    def _due(self, now: float) -> Iterator[tuple[AdmittedSequence, bool]]:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, key, only_waiting = heapq.heappop(self._deadlines)
            if key in self._sequences:
                yield self._sequences[key], only_waiting

    def _send_figures(self, now: float, figures: dict[str, float]) -> None:
        for client in self._clients.values():
            if client.figures_period is not None and now >= client.figures_at + client.figures_period:
                client.figures_at = now
                client.send(Frame({"type": "figures", "figures": figures}))

    def _status(self) -> EngineStatus:
        now = time.monotonic()
        figures = self._engine.figures()
        unfinished = len(self._sequences)
        running = min(unfinished, int(figures.get("running", unfinished)))
        return EngineStatus(
            pid=os.getpid(),
            state=self._state,
            running=running,
            waiting=unfinished - running,
            generated_tokens=self._tokens,
            finished=self._finished,
            refused=self._refused,
            cut=self._cut,
            stalled_seconds=self._progress.stalled_seconds(now),
            error=self._failure.message if self._failure else "",
            hint=self._failure.hint if self._failure else "",
            clients=tuple(
                ClientStatus(client.name, client.pid, client.unanswered, now - client.beat_at)
                for client in self._clients.values()
                if client.name
            ),
            worker_pids=self._engine.worker_pids,
        )


def _key(client: Connection, name: object) -> str:
    return f"{client.number}.{name}"


def _refusal(error: ForgeError) -> RequestFailure:
    return RequestFailure(ErrorCode.INVALID_ARGUMENT, f"{error.message}. {error.hint}")


def _failed(error: ForgeError) -> RequestFailure:
    return RequestFailure(ErrorCode.UNAVAILABLE, f"the engine ended: {error.message} (hint: {error.hint})")
