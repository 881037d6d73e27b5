"""Delays the answers to context_only requests until their prompts' KV blocks are in files for other engines."""

import threading
from collections.abc import Callable
from itertools import count
from time import monotonic

from trtforge.engine_process.requests import GenerationRequest, OnOutput, Output
from trtforge.runtime.delivery import deliver
from trtforge.runtime.kv_store import KvStore

_LONGEST = 10.0  # seconds that an answer is held back before it counts as late; twice as long at most


class StoredFirst:
    """Holds back the last output of each context_only request until its blocks are written, or for some seconds if the
    disk hangs; the engine that generates then computes the missing blocks itself.

    Used by the engine's thread; `ping`, called from any thread, makes that thread call a function.
    """

    def __init__(self, store: KvStore | None, ping: Callable[[Callable[[], None]], None]) -> None:
        self._store, self._ping = store, ping
        self._numbers = count()
        self._held: dict[int, tuple[OnOutput, Output, float]] = {}
        self._watched = False

    def receiver(self, request: GenerationRequest, on_output: OnOutput) -> OnOutput:
        """The callback for a request's outputs, which passes them to `on_output`."""
        store = self._store
        if store is None or not request.context_only:
            return on_output

        def receive(output: Output) -> None:
            if output.finish_reason is None or output.error is not None:
                on_output(output)
                return
            number = next(self._numbers)
            self._held[number] = on_output, output, monotonic()
            self._watch()
            store.when_written(lambda: self._ping(lambda: self._release(number)))

        return receive

    def flush(self) -> None:
        """Pass on all outputs held back, because the engine ends."""
        for number in list(self._held):
            self._release(number)

    def _release(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            deliver(held[0], held[1])

    def _watch(self) -> None:
        """Check in some seconds for outputs held back too long, if there are any."""
        if self._held and not self._watched:
            self._watched = True
            timer = threading.Timer(_LONGEST, self._ping, (self._release_late,))
            timer.daemon = True
            timer.start()

    def _release_late(self) -> None:
        late = monotonic() - _LONGEST
        for number in [number for number, (_, _, since) in self._held.items() if since <= late]:
            self._release(number)
        self._watched = False
        self._watch()
