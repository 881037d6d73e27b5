"""Bars share one display, show figures as soon as there are any, and write nothing outside a terminal."""

import io

import pytest
from rich.progress import Task

from trtforge.core.progress import Silent, Terminal, _Figures


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal whose text is thrown away."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    return Terminal()


def test_bars_side_by_side_each_count_for_themselves(terminal: Terminal) -> None:
    with terminal.bars(["rank 0", "rank 1"], 4, "steps") as bars:
        bars[1].advance(3)
        bars[1].describe("building")
        tasks = bars[0].progress.tasks  # type: ignore[attr-defined]
        assert [(task.description, task.completed, task.total) for task in tasks] == [
            ("rank 0", 0, 4),
            ("rank 1 building", 3, 4),
        ]


def test_nobody_sees_silent_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with Silent().waiting("convert"), Silent().bars(["rank 0", "rank 1"], 4, "steps") as bars:
        for bar in bars:
            bar.advance(1)
    assert len(bars) == 2
    assert capsys.readouterr() == ("", "")


def test_a_stage_waits_until_it_has_a_bar_and_between_bars(terminal: Terminal) -> None:
    def shown() -> list[tuple[str, bool]]:
        assert terminal._display is not None
        return [(task.description, task.visible) for task in terminal._display.tasks]

    with terminal.waiting("verify"):
        assert shown() == [("verify", True)]
        with terminal.bar("Comparing", 2, "parts"):
            assert shown() == [("verify", False), ("Comparing", True)]
        assert shown() == [("verify", True)]
        with pytest.raises(OSError, match="disk"), terminal.bar("Verifying", 2, "layers"):
            raise OSError("disk")
        assert shown() == [("verify", True)]
    assert terminal._display is None


def test_bars_inside_one_another_share_a_display(terminal: Terminal) -> None:
    with terminal.bar("Ranking", 8, "layers") as outer, terminal.bar("Verifying", 2, "windows") as inner:
        assert outer.progress is inner.progress  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("total", "completed", "unit", "elapsed", "text"),
    [
        (None, 0, "", 7.4, "0:07"),
        (32, 0, "layers", 65.0, "  0%  0/32 layers  1:05"),
        (32, 8, "layers", 4.0, " 25%  8/32 layers  2.0/s  0:12 left"),
        (10, 1, "layers", 400.0, " 10%  1/10 layers  400 s each  1:00:00 left"),
        (4_000_000_000, 1_000_000_000, "B", 2.0, " 25%  1 GB of 4 GB  500 MB/s  0:06 left"),
    ],
)
def test_figures_of_a_bar(total: float | None, completed: float, unit: str, elapsed: float, text: str) -> None:
    """The rate is there after the first step; rich's own needs two."""
    now = [100.0]
    task = Task(0, "x", total, completed, fields={"unit": unit}, _get_time=lambda: now[0])  # type: ignore[arg-type]
    task.start_time = 100.0 - elapsed
    assert _Figures().render(task).plain == text


def test_a_bar_fits_80_columns(terminal: Terminal) -> None:
    task = Task(0, "x", 9_999_000_000, 9_100_000_000, fields={"unit": "B"}, _get_time=lambda: 9000.0)  # type: ignore[arg-type]
    task.start_time = 0.0
    figures = _Figures().render(task).plain
    assert len(f"Calibrating int4_awq {'█' * 12} {figures}") <= 80
