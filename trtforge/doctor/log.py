"""Explains the first real error of a log: each rank is read separately, and the earliest cause wins.

The result depends on each rank's own lines only, not on how they are interleaved. Memory is bounded by the number
of ranks and patterns, not by the log.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trtforge.doctor.known import PATTERNS
from trtforge.doctor.log_lines import LogLine, parse_log
from trtforge.doctor.pattern import Kind, Pattern, filled

_SHOWN_LINES = 6
_SHOWN_TEXT = 400
_AHEAD = 5
"""Number of the rank's lines after a message that are searched for its continuation."""

_PRECEDENCE: tuple[Kind, ...] = ("harmless", "cause", "effect", "warning")
"""Which kind wins if several patterns match a line; among equals the first of the table."""
_PATTERNS = sorted(PATTERNS, key=lambda pattern: _PRECEDENCE.index(pattern.kind))

_WIDE = re.compile(r" {3,}")
_TRACE = re.compile(r"Traceback \(most recent call last\)|^\s+File \"[^\"]{1,400}\", line \d+")
_ANNOUNCED = "terminate called after throwing"  # the message is on the next line
_ERROR = re.compile(
    r"(?:"
    r"(?:[A-Za-z_][\w.]*)?(?:Error|Exception)(?::|$)"  # the last line of a Python trace
    r"|(?:\S+: )?(?:fatal )?(?i:error):|docker: "
    r"|terminate called|what\(\):|Segmentation fault|Bus error|Aborted\b|Signal \(\d+\) received"
    r"|.*\*\*\* Process received signal|.*\bexited on signal\b|\|.*\bUNAVAILABLE: "
    r")"
)


@dataclass(frozen=True)
class Seen:
    """A line of the log without its prefixes. `rank`: None if the log does not name it."""

    line: int
    rank: int | None
    text: str


@dataclass(frozen=True)
class Explained:
    """A known message. `lines`: the previous line if it is an error, the message, and its continuation."""

    pattern: Pattern
    values: dict[str, str]
    at: Seen
    lines: tuple[Seen, ...]
    times: int

    @property
    def means(self) -> str:
        """The pattern's explanation, with the log's values."""
        return filled(self.pattern.means, self.values)

    @property
    def do(self) -> str:
        """What to do first, with the log's values."""
        return filled(self.pattern.do, self.values)


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a log. `first`: the first known error, None without one.

    `unexplained`: the first unknown error lines, if they come before `first` or there is no `first`. `later`: other
    known errors, in order. `warnings`: known warnings. `ranks`: those named in the log.
    """

    first: Explained | None
    unexplained: tuple[Seen, ...]
    later: tuple[Explained, ...]
    warnings: tuple[Explained, ...]
    ranks: tuple[int, ...]
    lines: int

    @property
    def failed(self) -> bool:
        """Whether the log contains an error, known or not."""
        return self.first is not None or bool(self.unexplained)


def diagnose(pieces: Iterable[tuple[int, str]]) -> Diagnosis:
    """Read a log's numbered lines to the end."""
    readers: dict[int | None, _Reader] = {}
    last = 0
    for line in parse_log(pieces):
        last = line.number
        reader = readers.get(line.rank)
        if reader is None:
            reader = readers[line.rank] = _Reader(line.rank)
        reader.read(line)
    return _diagnosis([readers[rank] for rank in sorted(readers, key=_rank_order)], last)


@dataclass
class _Found:
    """A known message on one rank: its first occurrence, and the lines that belong to it."""

    pattern: Pattern
    kind: Kind
    values: dict[str, str]
    at: Seen
    lines: list[Seen]
    time: str | None
    position: int
    times: int = 1


@dataclass
class _Unknown:
    """The first error of one rank that no pattern matches."""

    lines: list[Seen]
    time: str | None
    position: int


_Timed = TypeVar("_Timed", _Found, _Unknown)


@dataclass
class _Reader:
    """Follows the lines of one rank."""

    rank: int | None
    found: dict[str, _Found] = field(default_factory=dict)
    unknown: _Unknown | None = None
    position: int = 0
    time: str | None = None
    above: LogLine | None = None
    frames: list[LogLine] | None = None
    logged: bool = False
    inside: set[str] = field(default_factory=set)
    waiting: list[tuple[_Found, int]] = field(default_factory=list)
    continuing: bool = False

    def read(self, line: LogLine) -> None:
        self.position += 1
        self.time = line.time or self.time
        if not self._is_frame(line):
            self._complete(line)
            if line.level != "info":
                self._match(line)
            self._continue(line)
            if line.level is None:  # a line with a level is interleaved and does not end the trace
                self.frames, self.logged, self.inside = None, False, set()
        self.above = line

    def _is_frame(self, line: LogLine) -> bool:
        """Whether this is a line of a Python trace other than the last, which names the error.

        A trace that a logger wrote has a level, and often a rank, in front of its first line only.
        """
        if self.frames is None or line.level is not None or not line.text.startswith((" ", "\t")):
            if _TRACE.search(line.text) is None or line.level in ("info", "warning"):
                return False
            self.frames, self.logged, self.inside = [], line.level == "error", set()
            if not line.text.startswith((" ", "\t")):
                return True
        if line.text.strip(" ^~"):
            self.frames = [*self.frames[-1:], line]
        self.inside |= {pattern.id for pattern in _PATTERNS if pattern.is_frame(line.text)}
        return True

    def _match(self, line: LogLine) -> None:
        known = False
        for pattern in _PATTERNS:
            values = pattern.search(line.text)
            if values is None or (pattern.inside is not None and pattern.id not in self.inside):
                continue
            known = True
            kind = pattern.kind_at(line.level)
            if kind != "harmless":
                self._note(pattern, kind, values, line)
                self.continuing = False
            break
        ends_trace = self.logged and bool(self.frames) and line.level is None
        if not known and self.unknown is None and (ends_trace or _is_error(line)):
            frames = [_seen(frame) for frame in self.frames or []]
            self.unknown = _Unknown(frames, self.time, self.position)
            self.continuing = True

    def _note(self, pattern: Pattern, kind: Kind, values: dict[str, str], line: LogLine) -> None:
        """Remember the message; an error replaces an earlier warning."""
        if self.continuing and self.unknown is not None and self.unknown.lines[-1].text.startswith(_ANNOUNCED):
            self.unknown = None
        before = self.found.get(pattern.id)
        if before is not None and (before.kind != "warning" or kind == "warning"):
            before.times += 1
            return
        above = [_seen(self.above)] if self.above is not None and self.above.level == "error" else []
        seen = _seen(line)
        found = _Found(pattern, kind, values, seen, [*above, seen], self.time, self.position)
        self.found[pattern.id] = found
        if pattern.then is not None:
            self.waiting.append((found, self.position + _AHEAD))
            self._complete(line)

    def _complete(self, line: LogLine) -> None:
        """Complete earlier messages with the values of this line."""
        still = []
        for found, until in self.waiting:
            more = found.pattern.search_on(line.text)
            found.values |= more
            if more and found.at.line != line.number:
                found.lines.append(_seen(line))
            if not more and self.position < until:
                still.append((found, until))
        self.waiting = still

    def _continue(self, line: LogLine) -> None:
        """Keep the lines of the unknown error: itself and the lines after it without another level."""
        if not self.continuing or self.unknown is None:
            return
        if self.position > self.unknown.position and line.level not in (None, "error"):
            self.continuing = False
            return
        self.unknown.lines.append(_seen(line))
        self.continuing = len(self.unknown.lines) < _SHOWN_LINES


def _is_error(line: LogLine) -> bool:
    return line.level == "error" or (line.level is None and _ERROR.match(line.text.lstrip()) is not None)


def _diagnosis(readers: Sequence[_Reader], lines: int) -> Diagnosis:
    errors = [(reader, found) for reader in readers for found in reader.found.values() if found.kind != "warning"]
    aborted = _aborted_rank(readers)
    chosen = _earliest([e for e in errors if e[1].kind == "cause"], aborted) or _earliest(errors, aborted)
    first = chosen[1] if chosen is not None else None
    failed = {found.pattern.id for _, found in errors}
    warnings = [f for reader in readers for f in reader.found.values() if f.pattern.id not in failed]
    return Diagnosis(
        first=_explained(first, readers) if first is not None else None,
        unexplained=_unexplained(readers, chosen, aborted),
        later=_explained_in_order([f for _, f in errors if first is None or f.pattern is not first.pattern], readers),
        warnings=_explained_in_order(warnings, readers),
        ranks=tuple(reader.rank for reader in readers if reader.rank is not None),
        lines=lines,
    )


def _aborted_rank(readers: Sequence[_Reader]) -> int | None:
    """The rank that called MPI_ABORT, as a consequence of its first error."""
    aborts = [reader.found["mpi-abort"] for reader in readers if "mpi-abort" in reader.found]
    return int(min(aborts, key=_order).values["rank"]) if aborts else None


def _earliest(found: Sequence[tuple[_Reader, _Found]], aborted: int | None) -> tuple[_Reader, _Found] | None:
    """The earliest of every rank's first message; without times, that of the rank that called MPI_ABORT."""
    firsts: dict[int | None, tuple[_Reader, _Found]] = {}
    for reader, each in found:
        if reader.rank not in firsts or each.position < firsts[reader.rank][1].position:
            firsts[reader.rank] = (reader, each)
    return _first_of_ranks(firsts.values(), aborted)


def _first_of_ranks(found: Collection[tuple[_Reader, _Timed]], aborted: int | None) -> tuple[_Reader, _Timed] | None:
    """The earliest of one message for each rank; without times, that of the rank `aborted`, else of the first rank."""
    timed = all(each.time is not None for _, each in found)
    return min(
        found,
        key=lambda e: (e[1].time if timed else "", aborted is None or e[0].rank != aborted, _rank_order(e[0].rank)),
        default=None,
    )


def _unexplained(
    readers: Sequence[_Reader], chosen: tuple[_Reader, _Found] | None, aborted: int | None
) -> tuple[Seen, ...]:
    """The unknown error lines to show: those before a cause, or on a rank other than that of an effect."""
    unknown = [(reader, reader.unknown) for reader in readers if reader.unknown is not None]
    if chosen is not None:
        unknown = [(r, u) for r, u in unknown if _comes_before(r, u, *chosen)]
    best = _first_of_ranks(unknown, aborted)
    return tuple(best[1].lines) if best is not None else ()


def _comes_before(reader: _Reader, unknown: _Unknown, other: _Reader, found: _Found) -> bool:
    """Whether `unknown` is earlier: by order on the same rank, else by time; always before another rank's effect."""
    if reader is other:
        return unknown.position < found.position
    timed = unknown.time is not None and found.time is not None
    return found.kind == "effect" or (timed and str(unknown.time) < str(found.time))


def _explained_in_order(found: Sequence[_Found], readers: Sequence[_Reader]) -> tuple[Explained, ...]:
    """Each message once, at its first occurrence."""
    firsts: dict[str, _Found] = {}
    for each in sorted(found, key=_order):
        firsts.setdefault(each.pattern.id, each)
    return tuple(_explained(each, readers) for each in firsts.values())


def _explained(found: _Found, readers: Sequence[_Reader]) -> Explained:
    same = [reader.found[found.pattern.id] for reader in readers if found.pattern.id in reader.found]
    times = sum(each.times for each in same)
    return Explained(found.pattern, dict(found.values), found.at, tuple(found.lines), times)


def _order(found: _Found) -> tuple[str, tuple[bool, int], int]:
    return (found.time or "~", _rank_order(found.at.rank), found.position)


def _rank_order(rank: int | None) -> tuple[bool, int]:
    """Sort key: ranks in order, then lines without a rank, because the launcher's errors follow from the ranks'."""
    return (rank is None, rank or 0)


def _seen(line: LogLine) -> Seen:
    text = _WIDE.sub("  ", line.text.strip())
    return Seen(line.number, line.rank, text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]} ...")
