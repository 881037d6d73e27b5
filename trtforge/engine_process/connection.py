"""One client's connection inside the engine process.

While the client is slow to read, its updates are merged per sequence, so its requests bound the memory that it needs.
"""

import socket
import threading
import time
from collections.abc import Callable

from trtforge.engine_process.frames import Frame, FrameReader
from trtforge.engine_process.messages import Update, encode_updates

_READ_SIZE = 1 << 18
_FRAME_INTERVAL = 0.025  # seconds; engines with faster steps send several tokens per frame


class Connection:
    """A model process, or a supervisor that asks for the status. `on_blocked`: called when the socket is full."""

    def __init__(self, sock: socket.socket, number: int, on_blocked: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.number = number
        self.name = ""
        self.pid = 0
        self.unanswered = 0
        self.beat_at = time.monotonic()
        self.figures_period: float | None = None
        self.figures_at = 0.0
        self._reader = FrameReader()
        self._on_blocked = on_blocked
        self._lock = threading.Lock()
        self._updates: dict[int, Update] = {}
        self._urgent = False
        self._flushed_at = 0.0
        self._unsent = bytearray()
        self._closed = False

    @property
    def wants_write(self) -> bool:
        """Whether bytes are to be sent when the socket becomes writable."""
        return bool(self._unsent) and not self._closed

    def receive(self) -> list[Frame] | None:
        """The frames that have arrived; None if the client is gone. Raises BadFrame."""
        try:
            data = self.sock.recv(_READ_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._reader.feed(data)) if data else None

    def add(self, name: int, update: Update, *, urgent: bool) -> None:
        """Keep an update for the next flush. `urgent`: a sequence's first or last one, which is sent without delay."""
        with self._lock:
            self._urgent |= urgent
            waiting = self._updates.get(name)
            if waiting is None:
                self._updates[name] = update
            else:
                waiting.merge(update)

    def send(self, frame: Frame) -> None:
        """Send a frame now, or when the socket becomes writable."""
        with self._lock:
            self._write(frame)

    def flush(self) -> None:
        """Send the updates as one frame, unless earlier bytes are unsent or the last frame was sent just now."""
        with self._lock:
            now = time.monotonic()
            due = self._urgent or now >= self._flushed_at + _FRAME_INTERVAL
            if due and not self._unsent and self._updates:
                updates, self._updates = self._updates, {}
                self._urgent, self._flushed_at = False, now
                self._write(encode_updates(updates))

    def on_writable(self) -> None:
        """Send unsent bytes, then updates."""
        with self._lock:
            self._push()
        self.flush()

    def close(self) -> None:
        """Drop the connection."""
        with self._lock:
            self._closed = True
            self._updates.clear()
            self.sock.close()

    def _write(self, frame: Frame) -> None:
        if self._closed:
            return
        blocked = bool(self._unsent)
        self._unsent += frame.encode()
        if not blocked:
            self._push()
            if self._unsent:
                self._on_blocked()

    def _push(self) -> None:
        try:
            while self._unsent and not self._closed:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the reading side notices that the client is gone
