"""Passes requests, cancellations and other messages from any thread to the engine's thread, which sleeps until then."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import GenerationRequest, OnOutput
from trtforge.runtime.scheduling.sequence import Sequence


@dataclass(slots=True)
class News:
    """Messages since the last `take`. `cancelled_if_waiting`: request ids to cancel unless they have begun to run.

    `prepared`: sequences whose guide was compiled or, with an error, refused.
    """

    submitted: list[tuple[GenerationRequest, OnOutput]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    cancelled_if_waiting: set[str] = field(default_factory=set)
    pings: list[Callable[[], None]] = field(default_factory=list)
    prepared: list[tuple[Sequence, ForgeError | None]] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether there is a message."""
        kinds = (self.submitted, self.cancelled, self.cancelled_if_waiting, self.pings, self.prepared)
        return any(kinds)


class Inbox:
    """Collects messages from any thread; one thread takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._news = News()
        self._closed: ForgeError | None = None
        self.closing = False

    @property
    def submitted(self) -> int:
        """Number of requests not yet taken."""
        return len(self._news.submitted)

    @property
    def _forked(self) -> bool:
        """Whether this is a forked copy, which lacks the taking thread and whose lock may be held forever."""
        return os.getpid() != self._process

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> ForgeError | None:
        """Queue requests, to be taken together.

        Returns the error if the engine has ended or this is a forked process.
        """
        if self._forked:
            hint = "Load an engine in this process, or start processes with multiprocessing's spawn."
            return ForgeError("the engine was loaded before this process was forked", hint=hint)
        with self._changed:
            if self.closing or self._closed is not None:
                return self._closed or ForgeError("the engine is closed", hint="Load it again.")
            self._news.submitted.extend(requests)
            self._changed.notify()
            return None

    def cancel(self, request_id: str, *, only_waiting: bool) -> None:
        """Cancel a request."""
        if self._forked:
            return
        with self._changed:
            (self._news.cancelled_if_waiting if only_waiting else self._news.cancelled).add(request_id)
            self._changed.notify()

    def ping(self, on_turn: Callable[[], None]) -> None:
        """Have the taking thread call `on_turn` as a sign of life."""
        with self._changed:
            self._news.pings.append(on_turn)
            self._changed.notify()

    def prepared(self, sequence: Sequence, error: ForgeError | None) -> None:
        """Report that a sequence's guide was compiled or refused."""
        with self._changed:
            self._news.prepared.append((sequence, error))
            self._changed.notify()

    def close(self) -> bool:
        """Wake the taking thread for the last time and refuse further requests. Returns False in a forked process."""
        if self._forked:
            return False
        with self._changed:
            self.closing = True
            self._changed.notify()
            return True

    def fail(self, error: ForgeError) -> list[tuple[GenerationRequest, OnOutput]]:
        """Refuse all later requests with `error`; returns the requests not yet taken."""
        with self._changed:
            self._closed = error
            left, self._news.submitted = self._news.submitted, []
            return left

    def take(self, *, wait: bool, seconds: float | None = None) -> News:
        """The messages so far. `wait`: sleep until there is one, or until `close`, or until `seconds` have passed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.closing or self._news.any, seconds)
            news, self._news = self._news, News()
            return news
