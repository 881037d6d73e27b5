"""Damaged and hostile files against the commands of the build side.

`python -m tests.assault fuzz --cases 3000 --seed 20260101`. A case is decided by the seed and its number alone, so
that one can be run again: `--only NUMBER`. Every refusal must say `error:` and `hint:` and end with status 1 or 2; no
case may leave a trace, hang, take a gigabyte or leave half an artifact.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from blake3 import blake3

from tests.assault.fuzz_inputs import make_inputs
from tests.assault.fuzz_mutations import damage
from tests.assault.fuzz_scenarios import NASTY_WORDS, SCENARIOS, Scenario
from tests.assault.fuzz_worker import MOST_MEMORY, Outcome, run_forked, warm_up

_TRACE = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|^Exception in thread", re.MULTILINE)
_RESEALED = 0.7
"""How often a damaged artifact gets the digests that belong to it, so that the damage is not seen at the door."""


@dataclass(frozen=True)
class Case:
    """One run: what was done to the inputs, and how it ended. `faults` is empty where all is as it must be."""

    number: int
    scenario: Scenario
    words: tuple[str, ...]
    done: str
    outcome: Outcome
    faults: tuple[str, ...]


def run_case(base: Path, work: Path, seed: int, number: int) -> Case:
    """Run one case in the directory `work`, which is emptied before."""
    source = random.Random(f"{seed}:{number}")
    scenario = source.choices(SCENARIOS, [each.weight for each in SCENARIOS])[0]
    shutil.rmtree(work, ignore_errors=True)
    place, logs = work / "case", work / "logs"
    for directory in (place, logs):
        directory.mkdir(parents=True)
    for name in scenario.inputs:
        copy = shutil.copytree if (base / name).is_dir() else shutil.copy
        copy(base / name, place / name)
    words, done = scenario.words, ""
    if scenario.damaged:
        done = _damage(place, scenario, source)
    else:
        nasty = source.choice(NASTY_WORDS)
        words, done = tuple(word.replace("{}", nasty) for word in words), f"word {nasty!r:.40}"
    before = _listing(work, scenario)
    outcome = run_forked(words, place, logs)
    faults = (*faults_of(outcome), *_left_behind(work, place, scenario, outcome, before))
    return Case(number, scenario, words, done, outcome, faults)


def _damage(place: Path, scenario: Scenario, source: random.Random) -> str:
    pattern = source.choice(scenario.damaged)
    path = source.choice(sorted(path for path in place.glob(pattern) if path.is_file()) or [place / "none"])
    if not path.exists():  # an index where there is one file
        path = next(path for path in sorted(place.glob(f"{scenario.inputs[0]}/*")) if path.is_file())
    try:
        data, done = damage(path, path.read_bytes(), source)
    except (ValueError, RecursionError):  # a mixture that cannot be written
        data, done = b"", "emptied"
    path.write_bytes(data)
    done = f"{path.relative_to(place)}: {done}"
    if path.name != "forge.json" and source.random() < _RESEALED and _reseal(path, place):
        done += " (digests made to fit)"
    return done


def _reseal(path: Path, place: Path) -> bool:
    from trtforge.core.manifest import FILE_NAME

    for artifact in path.parents:
        if (artifact / FILE_NAME).is_file():
            values = json.loads((artifact / FILE_NAME).read_text())
            values["files"][path.relative_to(artifact).as_posix()] = _record(path)
            (artifact / FILE_NAME).write_text(json.dumps(values))
            return True
        if artifact == place:
            break
    return False


def _record(path: Path) -> dict[str, int | str]:
    data = path.read_bytes()
    return {"bytes": len(data), "blake3": blake3(data).hexdigest()}  # on this thread, see fuzz_worker


def faults_of(outcome: Outcome) -> Iterator[str]:
    """What is wrong with how a command ended."""
    if outcome.timed_out:
        yield "hang"
        return
    if _TRACE.search(outcome.stderr):
        yield "traceback"
    elif outcome.status not in (0, 1, 2):
        yield f"status {outcome.status}"
    elif outcome.status != 0 and not re.search(r"^error: .*\S", outcome.stderr, re.MULTILINE):
        yield "no error:"
    elif outcome.status != 0 and not re.search(r"^hint: .*\S", outcome.stderr, re.MULTILINE):
        yield "no hint:"
    if outcome.memory > MOST_MEMORY:
        yield f"memory {outcome.memory >> 20} MB"


def _listing(work: Path, scenario: Scenario) -> dict[str, tuple[int, int]]:
    """Files with their sizes and times, apart from what the command may write."""
    found = {}
    for path in work.rglob("*"):
        parts = path.relative_to(work).parts
        relative = "/".join(parts[1:]) if parts[0] == "case" else ""
        out = scenario.out
        written = out is not None and (relative in (out, f".{out}.lock") or relative.startswith(f"{out}/"))
        if parts[0] != "logs" and not written and not path.is_dir():
            found["/".join(parts)] = (path.lstat().st_size, path.lstat().st_mtime_ns)
    return found


def _left_behind(
    work: Path, place: Path, scenario: Scenario, outcome: Outcome, before: dict[str, tuple[int, int]]
) -> Iterator[str]:
    """Half artifacts, files where none belong, and inputs that were changed."""
    from trtforge.core.manifest import FILE_NAME

    after = _listing(work, scenario)
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        yield f"changed {', '.join(changed[:3])}"
    if outcome.timed_out or scenario.out is None or not (place / scenario.out).exists():
        return
    if outcome.status != 0:
        yield f"refused, and {scenario.out} is there"
    elif (place / scenario.out).is_dir():
        made = place / scenario.out
        files = json.loads((made / FILE_NAME).read_text())["files"] if (made / FILE_NAME).is_file() else {}
        found = {p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()} - {FILE_NAME}
        if not files or found != set(files) or any(_record(made / name) != files[name] for name in files):
            yield "partial artifact"


def run_cases(base: Path, work: Path, seed: int, numbers: Sequence[int]) -> Iterator[Case]:
    """Run cases one after the other. The process must have called `warm_up`, and must not compute with torch."""
    for number in numbers:
        yield run_case(base, work, seed, number)


def describe(case: Case, seed: int) -> str:
    """A case with its faults and the end of what it said."""
    said = "\n".join(f"    {line[:300]}" for line in case.outcome.stderr.strip().splitlines()[-12:])
    head = f"case {seed}:{case.number} {', '.join(case.faults) or 'as it must be'}"
    figures = f"status {case.outcome.status}, {case.outcome.seconds:.1f} s, {case.outcome.memory >> 20} MB"
    return f"{head}\n  trtforge {' '.join(case.words)[:200]!r}\n  {case.done[:300]}\n  {figures}\n{said}"


def in_fork(base: Path) -> None:
    """Make the inputs in a process of its own: this one must not compute."""
    import os

    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            make_inputs(base)
            status = 0
        finally:
            os._exit(status)
    _, raw = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(raw) != 0:
        raise RuntimeError("the inputs could not be made")


def main(argv: Sequence[str]) -> int:
    """The long form: figures on stdout; status 1 where a case has a fault."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=int(datetime.now(timezone.utc).strftime("%Y%m%d")))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, action="append", help="run this case again and show what it says")
    parser.add_argument("--keep", type=Path, help="directory for the inputs of failing cases")
    options = parser.parse_args(argv)
    numbers = options.only or range(options.first, options.first + options.cases)
    print(f"seed {options.seed}, cases {numbers[0]} to {numbers[-1]}", flush=True)
    warm_up()
    statuses: Counter[int] = Counter()
    failed, slowest, most, started = 0, 0.0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trtforge-fuzz-") as scratch:
        base, work = Path(scratch) / "base", Path(scratch) / "work"
        in_fork(base)
        for case in run_cases(base, work, options.seed, numbers):
            statuses[case.outcome.status] += 1
            slowest, most = max(slowest, case.outcome.seconds), max(most, case.outcome.memory)
            if sum(statuses.values()) % 250 == 0:
                print(f"{sum(statuses.values())} cases, {failed} with faults", flush=True)
            if case.faults or options.only:
                print(describe(case, options.seed), flush=True)
            if case.faults:
                failed += 1
                if options.keep is not None:
                    shutil.copytree(work, options.keep / f"{options.seed}-{case.number}", dirs_exist_ok=True)
    ended = ", ".join(f"{count} with status {status}" for status, count in sorted(statuses.items()))
    print(f"{len(numbers)} cases in {time.monotonic() - started:.0f} s: {ended}; {failed} with faults")
    print(f"slowest {slowest:.1f} s, most memory {most >> 20} MB")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
