"""Progress on a terminal: bars with rate and remaining time, in one display on stderr; no output elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from trtforge.core.figures import size

_BAR_WIDTH = 12  # 80 columns suffice for the bar, its figures and 24 characters of its title
_OF_BYTES = "B"
_ROUNDING = 1e-6  # of shares that add up to whole units


class Bar(Protocol):
    """A progress bar that a stage updates."""

    def advance(self, amount: float) -> None:
        """Add `amount` finished units."""

    def describe(self, text: str) -> None:
        """Set the text for the current step."""


class Progress(Protocol):
    """Creates bars. Stages take it as an argument and do not depend on a terminal."""

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

    @contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """No output."""
        yield


@dataclass
class _RichBar:
    progress: RichProgress
    task: TaskID
    title: str

    def advance(self, amount: float) -> None:
        self.progress.advance(self.task, amount)

    def describe(self, text: str) -> None:
        self.progress.update(self.task, description=f"{self.title} {text}")


class _Figures(ProgressColumn):
    """Share, amount, rate and remaining time; elapsed time until there is a rate."""

    max_refresh = 0.2

    def render(self, task: Task) -> Text:
        """The text beside a bar."""
        passed = _clock(task.elapsed or 0.0)
        if task.total is None:
            return Text(passed, no_wrap=True)
        parts = [f"{task.percentage:3.0f}%", _amount(task)]
        speed = task.speed or (task.completed / task.elapsed if task.elapsed else None)
        if speed:
            parts += [_rate(speed, task.fields["unit"]), f"{_clock((task.total - task.completed) / speed)} left"]
        else:
            parts.append(passed)
        return Text("  ".join(parts), no_wrap=True)


def _amount(task: Task) -> str:
    unit, total = task.fields["unit"], task.total or 0
    if unit == _OF_BYTES:
        return f"{size(int(task.completed))} of {size(int(total))}"
    return f"{int(task.completed + _ROUNDING)}/{int(total)} {unit}"


def _rate(speed: float, unit: str) -> str:
    if unit == _OF_BYTES:
        return f"{size(int(speed))}/s"
    return f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.0f} s each"


def _clock(seconds: float) -> str:
    """Minutes and seconds, and hours if there are any."""
    whole = round(seconds)
    minutes = f"{whole // 60 % 60}:{whole % 60:02}"
    return minutes if whole < 3600 else f"{whole // 3600}:{minutes.rjust(5, '0')}"


class Terminal:
    """Rich bars on stderr. Nested bars, and bars opened while a stage waits, share one display."""

    def __init__(self) -> None:
        self._display: RichProgress | None = None
        self._waiting: TaskID | None = None

    @contextmanager
    def bar(self, title: str, total: float, unit: str) -> Iterator[Bar]:
        """A bar with count or bytes, rate and remaining time; it disappears at the end."""
        with self.bars([title], total, unit) as (bar,):
            yield bar

    @contextmanager
    def bars(self, titles: Sequence[str], total: float, unit: str) -> Iterator[Sequence[Bar]]:
        """Several bars, one per line."""
        with self._shown() as display, self._instead_of_waiting(display):
            made = [_RichBar(display, display.add_task(title, total=total, unit=unit), title) for title in titles]
            display.refresh()  # shows the first figures at once
            try:
                yield made
            finally:
                for bar in made:
                    display.remove_task(bar.task)

    @contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """Show `title` with the elapsed time whenever no bar is open."""
        with self._shown() as display:
            self._waiting = display.add_task(title, total=None, unit="")
            try:
                yield
            finally:
                display.remove_task(self._waiting)
                self._waiting = None

    @contextmanager
    def _shown(self) -> Iterator[RichProgress]:
        """The display; the outermost user opens and closes it."""
        if self._display is not None:
            yield self._display
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(_BAR_WIDTH), _Figures())
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as display:
            self._display = display
            try:
                yield display
            finally:
                self._display = None

    @contextmanager
    def _instead_of_waiting(self, display: RichProgress) -> Iterator[None]:
        """Hide the line of `waiting`."""
        if self._waiting is not None:
            display.update(self._waiting, visible=False)
        try:
            yield
        finally:
            if self._waiting is not None:
                display.update(self._waiting, visible=True)


def for_this_terminal(*, quiet: bool = False) -> Terminal | Silent:
    """Bars if stderr is a terminal and `quiet` is not set."""
    return Terminal() if sys.stderr.isatty() and not quiet else Silent()
