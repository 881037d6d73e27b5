import io

import pytest

from trtforge.core.progress import Silent, Terminal


def test_bars_side_by_side_each_count_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with Terminal().bars(["rank 0", "rank 1"], 4, "steps") as bars:
        bars[1].advance(3)
        bars[1].describe("building")
        tasks = bars[0].progress.tasks  # type: ignore[attr-defined]
        assert [(task.description, task.completed, task.total) for task in tasks] == [
            ("rank 0", 0, 4),
            ("rank 1 building", 3, 4),
        ]


def test_nobody_sees_silent_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with Silent().bars(["rank 0", "rank 1"], 4, "steps") as bars:
        for bar in bars:
            bar.advance(1)
    assert len(bars) == 2
    assert capsys.readouterr() == ("", "")
