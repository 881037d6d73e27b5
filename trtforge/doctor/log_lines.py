"""Parses one line of a log: its rank, time, level and text.

Prefixes are nested (docker compose around mpirun around Triton), so they are removed one by one. A line that is a JSON
object, as container runtimes and log collectors write them, stands for the message that it holds.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json

Level = Literal["info", "warning", "error"]

_PIECE = 1 << 16
_MOST_PREFIXES = 8  # nested
_LEVELS: dict[str, Level] = {"I": "info", "V": "info", "D": "info", "T": "info", "W": "warning"}
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), start=1
    )
}
_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\(B)")
_MESSAGE_KEYS = ("log", "message", "msg")  # of docker's json-file driver, and of most loggers
_TIME_KEYS = ("time", "timestamp", "@timestamp", "ts")
_LEVEL_KEYS = ("level", "severity")
_LEVEL_WORDS = re.compile(r"(?i:info|verbose|debug|trace|warn|err|fatal|crit)")
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # docker compose: the name of a container, numbered by default, then spaces up to the longest name and a |
        r"[A-Za-z0-9][\w.-]{0,200}(?:[-_]\d+ +| {2,})\| ?",
        # kubectl logs --prefix
        r"\[pod/[^\]\s]{1,400}\] ?",
        # journalctl
        rf"(?P<word>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK} [\w.-]{{1,200}} [\w@.-]{{1,200}}\[\d+\]: ?",
        # kubectl logs --timestamps, docker logs -t, Triton's --log-format=ISO8601
        rf"\d{{4}}-(?P<month>\d\d)-(?P<day>\d\d)[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?(?: (?:stdout|stderr) [FP])?"
        r"(?: (?P<level>[IWEF])\b(?= \d))?(?: (?P<pid>\d+) \S+\])?(?: - (?P<name>[A-Z]+) -)? ?",
        # mpirun --tag-output, with --timestamp-output in front of it; Open MPI 5 puts its own job's name first
        rf"(?:\w{{3}} (?P<word>\w{{3}}) +(?P<day>\d{{1,2}}) {_CLOCK} \d{{4}})?"
        r"\[(?:[\w.@-]+@)?\d+,(?P<rank>\d{1,9})\]<std(?:out|err|diag)>: ?",
        # torch.distributed
        r"\[rank(?P<rank>\d{1,9})\]:? ?",
        # TensorRT and TensorRT-LLM from Python, whose logger adds the time also to other packages' messages. The rank
        # is in front of the level (MPI_Rank in early releases), in 1.3 behind it after the name of a component
        rf"\[(?P<month>\d\d)/(?P<day>\d\d)/\d{{4}}-{_CLOCK}\] "
        r"(?:\[(?:TRT|TRT-LLM|TensorRT-LLM)\](?: \[(?:RANK|MPI_Rank) (?P<rank>\d{1,9})\])? \[(?P<level>[A-Z])\] ?"
        r"(?:\[[a-z_]{1,40}\](?:\[RANK (?P<late_rank>\d{1,9})\])? )?)?",
        # TensorRT-LLM from C++; Triton adds the exception's prefix after the logger's
        r"\[TensorRT-LLM\]\[(?P<name>[A-Z]+)\](?:\[(?P<rank>\d{1,9})\])? ?",
        r"\[TRT\] \[(?P<level>[A-Z])\] ?",
        # glog, used by Triton; some builds write the year
        rf"(?P<level>[IWEF])(?:\d{{4}})?(?P<month>\d\d)(?P<day>\d\d) {_CLOCK} +\d+ \S+:\d+\] ?",
        r"\[libprotobuf (?P<name>[A-Z]+) [^\]]*\] ?",
    )
)


@dataclass(frozen=True)
class LogLine:
    """`rank`: None if the log does not name it. `time` "MM-DD hh:mm:ss.f", comparable as text within one year.

    `level`: None if the line has none, as in the output of Python and the shell and in continuation lines.
    """

    number: int
    text: str
    rank: int | None = None
    time: str | None = None
    level: Level | None = None


def numbered_pieces(log: BinaryIO) -> Iterator[tuple[int, str]]:
    """The lines with their numbers; undecodable bytes are replaced. Memory is bounded for lines of any length.

    A line has several pieces if a progress bar redraws itself with carriage returns, or if it is longer than 64 KiB.
    """
    number = 1
    while piece := log.readline(_PIECE):
        for part in piece.decode("utf-8", errors="replace").rstrip("\n").split("\r"):
            if part:
                yield number, part
        number += piece.endswith(b"\n")


def parse_line(number: int, text: str, level: Level | None = None) -> LogLine:
    """Remove the known prefixes of a line; `level`: that of the record around it, for a line without its own."""
    line = LogLine(number, _COLOUR.sub("", text).rstrip(), level=level)
    for _ in range(_MOST_PREFIXES):
        before = line
        for prefix in _PREFIXES:
            match = prefix.match(line.text)
            if match is not None and match.end() > 0:
                line = _without(line, match)
        if line is before:
            break
    return line


def parse_log(pieces: Iterable[tuple[int, str]]) -> Iterator[LogLine]:
    """Every piece as a line, or as the lines of the message if it is a JSON record."""
    for number, text in pieces:
        for message, level in _messages(text):
            yield parse_line(number, message, level)


def _messages(text: str) -> Iterator[tuple[str, Level | None]]:
    """The lines of the message of a JSON record, with its time in front and its level; otherwise `text` itself."""
    record = _record(text)
    message = _text_of(record, _MESSAGE_KEYS)
    if not message:
        yield text, None
        return
    time = _text_of(record, _TIME_KEYS)
    word = _LEVEL_WORDS.match(_text_of(record, _LEVEL_KEYS))
    for line in message.splitlines():
        yield f"{time} {line}" if time[4:5] == "-" else line, _level(word[0][0].upper()) if word else None


def _record(text: str) -> dict[str, object]:
    """The JSON object in `text`, empty if there is none."""
    if not text.startswith("{"):
        return {}
    try:
        record = parse_json(text, "the log", hint="", unique=False, halves=True)
    except ForgeError:
        return {}
    return record if isinstance(record, dict) else {}


def _text_of(record: dict[str, object], keys: tuple[str, ...]) -> str:
    """The first of these keys that has a text, else an empty text."""
    return next((value for key in keys if isinstance(value := record.get(key), str)), "")


def _without(line: LogLine, match: re.Match[str]) -> LogLine:
    found = match.groupdict()
    level = _level(found.get("level") or (found.get("name") or "")[:1])
    rank, clock = found.get("rank") or found.get("late_rank"), found.get("clock")
    month = found.get("month") or _MONTHS.get(found.get("word") or "")
    time = f"{int(month):02d}-{int(found['day']):02d} {clock.replace(',', '.')}" if clock and month else None
    return replace(
        line,
        text=line.text[match.end() :],
        # The innermost prefix, the program's own, determines rank and level; the outermost determines the time.
        rank=int(rank) if rank is not None else line.rank,
        level=level or line.level,
        time=line.time or time,
    )


def _level(letter: str) -> Level | None:
    """The level of a letter or of a word's first letter; unknown letters are errors."""
    return _LEVELS.get(letter, "error") if letter else None
