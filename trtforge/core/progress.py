"""Progress of long work: a bar with rate and remaining time on a terminal, nothing anywhere else."""

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
    """What a stage reports to while it works."""

    def advance(self, amount: float) -> None:
        """`amount` more units of the total are done."""

    def describe(self, text: str) -> None:
        """What is being worked on now."""


class Progress(Protocol):
    """Makes bars. Stages take one as an argument; none of them knows whether a terminal is there."""

    def bar(self, title: str, total: float, unit: str) -> AbstractContextManager[Bar]:
        """A bar over `total` units ('B' for bytes, else a plural noun)."""

    def bars(self, titles: Sequence[str], total: float, unit: str) -> AbstractContextManager[Sequence[Bar]]:
        """A bar for each of several pieces of work that go on side by side."""


class _NoBar:
    def advance(self, amount: float) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class Silent:
    """Progress for scripts, pipes and tests."""

    @contextmanager
    def bar(self, title: str, total: float, unit: str) -> Iterator[Bar]:
        """A bar that nobody sees."""
        yield _NoBar()

    @contextmanager
    def bars(self, titles: Sequence[str], total: float, unit: str) -> Iterator[Sequence[Bar]]:
        """Bars that nobody sees."""
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
        """A bar with count or bytes, rate and remaining time; it goes away when the work is done."""
        with self.bars([title], total, unit) as (bar,):
            yield bar

    @contextmanager
    def bars(self, titles: Sequence[str], total: float, unit: str) -> Iterator[Sequence[Bar]]:
        """Such bars below one another."""
        amounts: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()]
            if unit == "B"
            else [MofNCompleteColumn(), TextColumn(unit), _RateColumn(unit)]
        )
        columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *amounts, TimeRemainingColumn()]
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield [_RichBar(progress, progress.add_task(title, total=total), title) for title in titles]


def for_this_terminal(*, quiet: bool = False) -> Progress:
    """Bars if stderr is a terminal and the user wants them."""
    return Terminal() if sys.stderr.isatty() and not quiet else Silent()
