import os
import signal
import sys
from pathlib import Path

import pytest

from trtforge.compile.build_site import Run
from trtforge.compile.jobs import Job, Observer, run_jobs
from trtforge.core.errors import LoggedError

BEGUN = "from pathlib import Path; import os; Path('new').write_text(str(os.getpid())); os.rename('new', 'begun');"
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {BEGUN} time.sleep(60)"
PARENT = f"import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); {BEGUN} time.sleep(60)"


class Directories(Observer[Job]):
    """Makes directories, and fails as soon as all of `until` have begun."""

    def __init__(self, *until: Job) -> None:
        self.until = until
        self.done: list[str] = []

    def begin(self, job: Job) -> None:
        job.directory.mkdir()

    def look(self, job: Job) -> None:
        if self.until and all((each.directory / "begun").exists() for each in self.until):
            raise ZeroDivisionError

    def finished(self, job: Job) -> None:
        self.done.append(job.name)


def job(tmp_path: Path, name: str, code: str, cleanup: tuple[str, ...] = ()) -> Job:
    run = Run((sys.executable, "-c", code), {"WHO": name}, cleanup)
    return Job(name, run, tmp_path / name, tmp_path / f"{name}.log")


def is_gone(job: Job) -> bool:
    return not Path("/proc", (job.directory / "begun").read_text()).exists()


def test_jobs_of_a_lane_run_in_order_with_their_own_log_and_environment(tmp_path: Path) -> None:
    jobs = [job(tmp_path, name, "import os; print(os.environ['WHO'], os.getcwd())") for name in ("a", "b", "c")]
    seen = Directories()
    run_jobs([jobs], seen)
    assert seen.done == ["a", "b", "c"]
    assert [each.log.read_text() for each in jobs] == [f"{each.name} {each.directory}\n" for each in jobs]


def test_an_error_of_the_observer_ends_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.compile.jobs._GRACE", 0.1)
    jobs = [job(tmp_path, "stubborn", STUBBORN), job(tmp_path, "parent", PARENT)]
    with pytest.raises(ZeroDivisionError):
        run_jobs([[each] for each in jobs], Directories(*jobs))
    assert all(is_gone(each) for each in jobs)


class Signals(Directories):
    """Sends us a signal where an exception would be lost: while an object is let go of."""

    def __init__(self, number: signal.Signals, moment: str, job: Job) -> None:
        super().__init__()
        self.number, self.moment, self.job = number, moment, job

    def look(self, job: Job) -> None:
        if self.moment == "running" and (self.job.directory / "begun").exists():
            _Dying(self.number)

    def finished(self, job: Job) -> None:
        if self.moment == "finished":
            _Dying(self.number)


class _Dying:
    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("moment", ["running", "finished"])
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_no_signal_is_lost(tmp_path: Path, number: signal.Signals, ends: type[BaseException], moment: str) -> None:
    before = signal.getsignal(number)
    each = job(tmp_path, "a", BEGUN + ("import time; time.sleep(60)" if moment == "running" else ""))
    with pytest.raises(ends) as caught:
        run_jobs([[each]], Signals(number, moment, each))
    assert not isinstance(caught.value, SystemExit) or caught.value.code == 128 + number
    assert is_gone(each)
    assert signal.getsignal(number) is before


def test_an_ignored_interruption_stays_ignored(tmp_path: Path) -> None:
    """As in a background job of a shell script."""
    each = job(tmp_path, "a", BEGUN)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_jobs([[each]], Signals(signal.SIGINT, "finished", each))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_failure_starts_nothing_more_and_cleans_up(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    clean = (sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    fails, never = job(tmp_path, "fails", "import sys; sys.exit(3)", clean), job(tmp_path, "never", "", clean)
    with pytest.raises(LoggedError, match="fails ended with status 3") as caught:
        run_jobs([[fails, never]], Directories())
    assert caught.value.log == fails.log
    assert str(fails.log) in caught.value.hint
    assert mark.exists()
    assert not never.directory.exists()


def test_what_succeeds_needs_no_cleaning(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    run_jobs([[job(tmp_path, "a", "", (sys.executable, "-c", f"open({str(mark)!r}, 'w')"))]], Directories())
    assert not mark.exists()


def test_what_a_job_leaves_running_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess; open('child', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    leaves = job(tmp_path, "leaves", code)
    run_jobs([[leaves]], Directories())
    child = Path("/proc", (leaves.directory / "child").read_text())
    assert not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2].split()[0]


def test_a_program_that_is_not_there_ends_the_others(tmp_path: Path) -> None:
    first = job(tmp_path, "first", f"{BEGUN} import time; time.sleep(60)")
    missing = Job("missing", Run(("/nowhere/program",)), tmp_path / "missing", tmp_path / "missing.log")
    with pytest.raises(FileNotFoundError, match="/nowhere/program"):
        run_jobs([[first], [missing]], Directories())


@pytest.mark.parametrize(
    "cleanup",
    [(sys.executable, "-c", "import time; time.sleep(60)"), ("/no/such/program", "rm")],
    ids=["hangs", "absent"],
)
def test_a_cleanup_that_fails_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleanup: tuple[str, ...]
) -> None:
    monkeypatch.setattr("trtforge.compile.jobs._CLEANUP_TIMEOUT", 0.1)
    with pytest.raises(LoggedError, match="a ended with status 3"):
        run_jobs([[job(tmp_path, "a", "raise SystemExit(3)", cleanup)]], Directories())
