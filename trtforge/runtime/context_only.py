"""Answers to context_only requests, which come when the KV blocks of their prompts are in files for other engines."""

import threading
from collections.abc import Callable
from itertools import count
from time import monotonic

from trtforge.engine_process.requests import GenerationRequest, OnOutput, Output
from trtforge.runtime.delivery import deliver
from trtforge.runtime.kv_store import KvStore

_LONGEST = 10.0  # seconds; twice as many at most


class StoredFirst:
    """Holds back the last output of each context_only request until what it stored is written, or for some seconds
    where the disk hangs: the engine that goes on computes what it does not find.

    Used by the engine's thread; `ping` has it call a function, from any thread.
    """

    def __init__(self, store: KvStore | None, ping: Callable[[Callable[[], None]], None]) -> None:
        self._store, self._ping = store, ping
        self._numbers = count()
        self._held: dict[int, tuple[OnOutput, Output, float]] = {}
        self._watched = False

    def receiver(self, request: GenerationRequest, on_output: OnOutput) -> OnOutput:
        """What takes the outputs of a request and passes them to `on_output`."""
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
        """Pass on what is held back: the engine ends."""
        for number in list(self._held):
            self._release(number)

    def _release(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            deliver(held[0], held[1])

    def _watch(self) -> None:
        """Look at what is held back in some seconds, if there is anything."""
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
