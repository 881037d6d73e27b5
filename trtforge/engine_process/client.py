"""A model process's connection to the engine process: requests go out, updates come back in batches.

It reconnects by itself after the engine process was restarted.
"""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from trtforge.engine_process.ended_requests import Counted
from trtforge.engine_process.frames import BadFrame, Frame, FrameReader, require_readable
from trtforge.engine_process.messages import Submission, Update, decode_updates
from trtforge.engine_process.requests import ErrorCode, GenerationRequest, RequestFailure

_HEARTBEAT_INTERVAL = 1.0  # seconds
_RECONNECT_INTERVAL = 0.05  # seconds
_READ_SIZE = 1 << 20
_SEND_TIMEOUT = 10.0  # seconds until an engine process that reads nothing counts as lost
_NOT_LOADED = RequestFailure(ErrorCode.UNAVAILABLE, "the engine is not loaded yet; retry in 2 s")


class Receiver(Protocol):
    """Receives the updates of one submission's sequences."""

    def take(self, updates: list[tuple[int, Update]]) -> None:
        """Take updates, each with its sequence's index in the submission. Must not raise.

        Called on the client's thread, or within `submit` if the engine process cannot be reached.
        """


class Submitted:
    """Submitted sequences by their names in the channel, and their receiver."""

    def __init__(self, names: range, receiver: Receiver) -> None:
        self.names = names
        self.receiver = receiver


class EngineClient:
    """Requests to one engine process. `close` ends its thread."""

    def __init__(
        self,
        path: Path,
        name: str,
        pid: int,
        *,
        figures_period: float | None = None,
        on_figures: Callable[[Mapping[str, float]], None] = lambda figures: None,
    ) -> None:
        self._path = path
        self._hello = Frame({"type": "hello", "name": name, "pid": pid, "figures_period": figures_period})
        self._on_figures = on_figures
        self._next_name = 0
        self._held = bytearray()
        self._holder = 0  # the thread within `together`
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._submitted: dict[int, Submitted] = {}
        self._pings: dict[int, Callable[[RequestFailure | None], None]] = {}
        self._socket: socket.socket | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    @property
    def unanswered(self) -> int:
        """Number of unfinished sequences."""
        return len(self._submitted)

    def submit(
        self,
        requests: tuple[GenerationRequest, ...],
        receiver: Receiver,
        timeout: float | None = None,
        counted: Counted = "all",
    ) -> Submitted:
        """Start sequences. `receiver` gets their updates, or an error for each. `timeout`: seconds for all of them.

        `counted`: which ends the metrics count; see `count_answered`.
        """
        with self._lock:
            names = range(self._next_name, self._next_name + len(requests))
            self._next_name = names.stop
            submitted = Submitted(names, receiver)
            for name in names:
                self._submitted[name] = submitted
        data = Submission(requests, timeout, names.start, counted).encode().encode()
        try:
            require_readable(data)
        except BadFrame as error:
            failure = RequestFailure(ErrorCode.INVALID_ARGUMENT, f"the request is too large for the engine: {error}")
            self._fail(dict.fromkeys(names, submitted), failure)
        else:
            if not self._send(data):
                self._fail(dict.fromkeys(names, submitted), _NOT_LOADED)
        return submitted

    @contextmanager
    def together(self) -> Iterator[None]:
        """Buffer this thread's frames and send them together at the end. For one thread at a time."""
        self._held, self._holder = bytearray(), threading.get_ident()
        try:
            yield
        finally:
            held, self._holder = self._held, 0
            if held and not self._write(held):
                self._fail_all(_NOT_LOADED)

    def cancel(self, submitted: Submitted) -> None:
        """Cancel the unfinished sequences of a submission; their last updates still arrive."""
        with self._lock:
            names = [name for name in submitted.names if name in self._submitted]
        if names:
            self._send(Frame({"type": "cancel", "names": names}).encode())

    def count_answered(self, seconds: float) -> None:
        """Count a request that was answered in parts, whose own ends were not counted. `seconds`: since its arrival."""
        self._send(Frame({"type": "answered", "seconds": seconds}).encode())

    def ping(self, answer: Callable[[RequestFailure | None], None]) -> None:
        """Call `answer` once: with None after the next iteration of the engine's loop, else with the failure."""
        with self._lock:
            number = self._next_name
            self._next_name += 1
            self._pings[number] = answer
        if not self._send(Frame({"type": "ping", "number": number}).encode()):
            with self._lock:
                lost = self._pings.pop(number, None) is not None
            if lost:
                answer(_NOT_LOADED)

    def close(self) -> None:
        """End the connection and the thread; unfinished sequences get an error."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            channel = self._connect()
            if channel is None:
                self._closing.wait(_RECONNECT_INTERVAL)
                continue
            with suppress(OSError, BadFrame):  # handled below like a closed connection
                self._serve(channel)
            with self._send_lock:
                self._socket = None
                channel.close()
            self._fail_all(RequestFailure(ErrorCode.UNAVAILABLE, "the engine process ended; retry in 5 s"))

    def _connect(self) -> socket.socket | None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.settimeout(_SEND_TIMEOUT)
        try:
            channel.connect(str(self._path))
            with self._send_lock:
                channel.sendall(self._hello.encode())
                self._socket = channel
        except OSError:
            channel.close()
            return None
        return channel

    def _serve(self, channel: socket.socket) -> None:
        """Read until the connection ends. Updates that are received together are merged."""
        reader = FrameReader()
        beat_at = 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + _HEARTBEAT_INTERVAL
                self._send(Frame({"type": "beat", "unanswered": len(self._submitted)}).encode())
            if not select.select([channel], [], [], min(0.25, beat_at - now))[0]:
                continue
            data = channel.recv(_READ_SIZE)
            if not data:
                return
            updates: dict[int, Update] = {}
            for frame in reader.feed(data):
                self._take(frame, updates)
            self._hand_out(updates)

    def _take(self, frame: Frame, updates: dict[int, Update]) -> None:
        match frame.header.get("type"):
            case "updates":
                for name, update in decode_updates(frame).items():
                    if name in updates:
                        updates[name].merge(update)
                    else:
                        updates[name] = update
            case "figures":
                self._on_figures(frame.header["figures"])
            case "pong":
                answer = self._pings.pop(frame.header["number"], None)
                if answer is not None:
                    answer(None)
            case _:
                raise BadFrame(f"unknown frame type {frame.header.get('type')!r}")

    def _hand_out(self, updates: Mapping[int, Update]) -> None:
        by_submission: dict[int, tuple[Submitted, list[tuple[int, Update]]]] = {}
        with self._lock:
            for name, update in updates.items():
                submitted = self._submitted.get(name)
                if submitted is None:
                    continue
                if update.finish_reason is not None:
                    del self._submitted[name]
                index = name - submitted.names.start
                by_submission.setdefault(id(submitted), (submitted, []))[1].append((index, update))
        for submitted, taken in by_submission.values():
            submitted.receiver.take(taken)

    def _fail_all(self, failure: RequestFailure) -> None:
        with self._lock:
            pings, self._pings = self._pings, {}
            submitted = dict(self._submitted)
        self._fail(submitted, failure)
        for answer in pings.values():
            answer(failure)

    def _fail(self, submitted: Mapping[int, Submitted], failure: RequestFailure) -> None:
        self._hand_out({name: Update(finish_reason="error", failure=failure) for name in submitted})

    def _send(self, frame: bytes) -> bool:
        if self._holder == threading.get_ident():
            self._held += frame
            return True
        return self._write(frame)

    def _write(self, data: bytes | bytearray) -> bool:
        """Send bytes; returns whether that succeeded. The reading thread handles a broken connection."""
        with self._send_lock:
            if self._socket is None:
                return False
            try:
                self._socket.sendall(data)
            except OSError:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return False
        return True
