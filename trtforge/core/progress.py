"""Progress bars with rate and remaining time on a terminal; no output elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text


class Bar(Protocol):
    """A progress bar that a stage updates."""

    def advance(self, amount: float) -> None:
        """Add `amount` finished units."""

    def describe(self, text: str) -> None:
        """Set the text for the current step."""


class Progress(Protocol):
    """Creates bars. Stages take one as an argument and need not know whether there is a terminal."""

    def bar(self, title: str, total: float, unit: str) -> AbstractContextManager[Bar]:
        """A bar over `total` units ('B' for bytes, else a plural noun)."""

    def bars(self, titles: Sequence[str], total: float, unit: str) -> AbstractContextManager[Sequence[Bar]]:
        """One bar per parallel task."""


class _NoBar:
    def advance(self, amount: float) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class Silent:
    """Progress for scripts, pipes and tests."""

    @contextmanager
    def bar(self, title: str, total: float, unit: str) -> Iterator[Bar]:
        """A bar without output."""
        yield _NoBar()

    @contextmanager
    def bars(self, titles: Sequence[str], total: float, unit: str) -> Iterator[Sequence[Bar]]:
        """Bars without output."""
        yield [_NoBar() for _ in titles]


@dataclass
class _RichBar:
    progress: RichProgress
    task: TaskID
    title: str

    def advance(self, amount: float) -> None:
        self.progress.advance(self.task, amount)

    def describe(self, text: str) -> None:
        self.progress.update(self.task, description=f"{self.title} {text}")


class _RateColumn(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} {self._unit}/s" if task.speed else "")


class Terminal:
    """Rich bars on stderr."""

    @contextmanager
    def bar(self, title: str, total: float, unit: str) -> Iterator[Bar]:
        """A bar with count or bytes, rate and remaining time; it disappears at the end."""
        with self.bars([title], total, unit) as (bar,):
            yield bar

    @contextmanager
    def bars(self, titles: Sequence[str], total: float, unit: str) -> Iterator[Sequence[Bar]]:
        """Several bars, one per line."""
        amounts: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()]
            if unit == "B"
            else [MofNCompleteColumn(), TextColumn(unit), _RateColumn(unit)]
        )
        columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *amounts, TimeRemainingColumn()]
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield [_RichBar(progress, progress.add_task(title, total=total), title) for title in titles]


def for_this_terminal(*, quiet: bool = False) -> Progress:
    """Bars if stderr is a terminal and `quiet` is not set."""
    return Terminal() if sys.stderr.isatty() and not quiet else Silent()
