"""A trace of every iteration of the engine, as JSON that Perfetto and Chrome's about:tracing read.

Format: "Trace Event Format" (Google, 2016), an array of events: slices (X) for iterations and their phases, counters
(C), and spans (b, e) of requests. Events are written at once, so the trace of a killed engine can be read too.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence as Rows
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Sequence

PHASES = ("schedule", "forward", "sample", "emit")
"""The phases of an iteration, in order."""
_ENGINE, _REQUESTS = 1, 2
"""Process ids in the trace, shown as rows of the viewer."""
_LOG = logging.getLogger(__name__)


class Trace:
    """Writes one file; all but `close` run on the engine's thread. Times are microseconds since the trace began."""

    def __init__(self, path: Path, name: str) -> None:
        """`name`: of the engine, for the viewer. Raises ForgeError if the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or str(error)
            raise ForgeError(
                f"the trace {path} cannot be written: {reason}", hint="Name a file in a directory that exists."
            ) from None
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._file.write("[\n")
        self._file.write(_line(_name(_ENGINE, name)))
        self._write(_name(_REQUESTS, "requests"))

    def begin(self, sequence: Sequence) -> None:
        """See Observer, of `observers.py`."""
        request = sequence.request
        self._request(sequence, "b", {"prompt_tokens": len(request.prompt), "max_tokens": request.max_tokens})

    def end(self, sequence: Sequence, scheduler: Scheduler) -> None:
        """See Observer. If nothing runs, no iteration may come to tell the counters."""
        self._request(
            sequence,
            "e",
            {
                "generated_tokens": sequence.generated,
                "reused_blocks": sequence.reused_blocks,
                "finish_reason": sequence.finish_reason,
            },
        )
        if not scheduler.running:
            self._write(*_counters(self._micros(time.perf_counter()), _levels(scheduler)))

    def iteration(self, number: int, rows: Rows[Row], times: Rows[float], sampled: int, scheduler: Scheduler) -> None:
        """See Observer."""
        marks = [self._micros(moment) for moment in times]
        context = sum(row.count for row in rows if row.start < len(row.sequence.request.prompt))
        levels = _levels(scheduler)
        tokens = {"context": context, "generation": sum(row.count for row in rows) - context}
        slice_args = {"rows": len(rows), "sampled": sampled, "pauses": scheduler.pauses}
        args = {**slice_args, "tokens": tokens, "blocks": levels["KV blocks"], "sequences": levels["sequences"]}
        name = f"iteration {number}" if rows else f"tokens of iteration {number}"
        events = [_slice(name, marks[0], marks[-1], args)]
        events += [_slice(name, marks[index], marks[index + 1], {}) for index, name in enumerate(PHASES)]
        events += [*_counters(marks[0], {"tokens": tokens}), *_counters(marks[-1], levels)]
        self._write(*events)

    def close(self) -> None:
        """End the file. May be called again."""
        self._append("\n]\n")
        with self._lock, suppress(OSError):
            self._file.close()

    def _request(self, sequence: Sequence, phase: str, args: dict[str, Any]) -> None:
        name = f"request {sequence.request.request_id}"
        now = self._micros(time.perf_counter())
        event = {"name": name, "cat": "request", "ph": phase, "id": sequence.order, "ts": now, "pid": _REQUESTS}
        self._write({**event, "tid": 1, "args": args})

    def _micros(self, moment: float) -> float:
        return round((moment - self._start) * 1e6, 1)

    def _write(self, *events: dict[str, Any]) -> None:
        self._append("".join(f",\n{_line(event)}" for event in events))

    def _append(self, text: str) -> None:
        """Write at once. A full disk ends the trace, not the engine."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                _LOG.warning("the trace %s ends here: %s", self._file.name, error.strerror)
                with suppress(OSError):
                    self._file.close()


def _levels(scheduler: Scheduler) -> dict[str, dict[str, int]]:
    """Values of counters after an iteration, or after a request has ended without one; no tokens if nothing is left."""
    blocks = scheduler.blocks
    levels = {
        "KV blocks": {"used": blocks.pool.used, "free": blocks.free_blocks},
        "sequences": {"running": len(scheduler.running), "waiting": len(scheduler.waiting)},
    }
    return levels | ({"tokens": {"context": 0, "generation": 0}} if scheduler.idle else {})


def _counters(moment: float, values: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    return [{"name": name, "ph": "C", "ts": moment, "pid": _ENGINE, "args": args} for name, args in values.items()]


def _slice(name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = round(max(0.0, end - begin), 1)
    return {"name": name, "ph": "X", "ts": begin, "dur": duration, "pid": _ENGINE, "tid": 1, "args": args}


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))
