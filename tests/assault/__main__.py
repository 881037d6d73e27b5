"""`python -m tests.assault NAME...`: attack a server and judge it; status 1 if anything that must hold does not."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from tests.assault import departures, kills, ladder, malformed, soak, startstop
from tests.assault.report import Report
from tests.assault.repositories import DEFAULT, build, is_exact, without_reuse
from tests.assault.server import AssaultError

Run = Callable[[Path, str, argparse.Namespace], Report]
_WHOLE = ("ladder", "departures", "malformed", "kills", "startstop")


def main(argv: Sequence[str]) -> int:
    """Run the attacks that were named; the exit status."""
    signal.signal(signal.SIGTERM, _end)
    if argv and argv[0] == "fuzz":
        return _fuzz(argv[1:])
    arguments = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    attacks = _attacks()
    failed = []
    try:
        repositories = _repositories(arguments)
    except AssaultError as error:
        console.print(f"FAILED {error}", markup=False)
        return 1
    for name in arguments.names or _WHOLE:
        for title, repository in _meant_for(name, repositories, arguments):
            try:
                report = attacks[name](repository, title, arguments)
            except AssaultError as error:
                report = Report(f"{name}, {title}")
                report.check("the attack can be made", False, error)
            report.show(console)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(report.as_json() + "\n")
            if name == "soak":
                print(report.markdown())
            failed += [] if report.passed else [report.name]
    if not arguments.names and _fuzz(()):
        failed.append("fuzz")
    console.print(f"failed: {'; '.join(failed)}" if failed else "all passed", markup=False)
    return 1 if failed else 0


def _fuzz(argv: Sequence[str]) -> int:
    """The build side's attack, which has options of its own; its exit status."""
    module = importlib.import_module("tests.assault.fuzz_build")
    return int(module.main(list(argv)) or 0)


def _attacks() -> Mapping[str, Run]:
    return {
        "ladder": lambda repository, name, given: ladder.run(
            repository, name, ladder.Options(rungs=given.rungs, connections=given.connections)
        ),
        "departures": lambda repository, name, given: departures.run(
            repository,
            name,
            departures.Options(
                requests=given.requests,
                runs=given.runs,
                seed=given.seed,
                concurrency=given.concurrency,
                busy=given.busy,
            ),
        ),
        "malformed": lambda repository, name, given: malformed.run(
            repository, name, malformed.Options(every=given.every, skip=given.skip)
        ),
        "kills": lambda repository, name, given: kills.run(
            repository, name, kills.Options(times=given.times or 10, roles=given.roles)
        ),
        "startstop": lambda repository, name, given: startstop.run(
            repository, name, startstop.Options(times=given.times or 100)
        ),
        "soak": lambda repository, name, given: soak.run(
            repository, name, soak.Options(seconds=given.seconds, workers=given.workers, seed=given.seed)
        ),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.assault",
        description="Attack a server and judge it. `python -m tests.assault fuzz --help`: the build side.",
    )
    names = (*_WHOLE, "soak")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; none: all but soak, and fuzz")
    parser.add_argument("--repository", type=Path, help="attack this one; left out: demo-fp32 and demo-int4awq, built")
    parser.add_argument("--out", type=Path, default=DEFAULT, help="where repositories are built")
    parser.add_argument("--tp2", action="store_true", help="kills: of an engine with two ranks too")
    parser.add_argument("--json", type=Path, help="append each report to this file, one JSON object a line")
    parser.add_argument("--seed", type=int, default=0, help="departures, soak: of what is random; 0 chooses one")
    parser.add_argument("--rungs", type=int, nargs="+", default=ladder.RUNGS, help="ladder: requests at once")
    parser.add_argument("--connections", type=int, default=256, help="ladder: of the HTTP client")
    parser.add_argument("--requests", type=int, default=2000, help="departures: of a run")
    parser.add_argument("--runs", type=int, default=20, help="departures: how many")
    parser.add_argument("--concurrency", type=int, default=500, help="departures: requests at once")
    parser.add_argument("--busy", action=argparse.BooleanOptionalAction, default=True, help="departures: loops beside")
    parser.add_argument("--every", type=int, default=1, help="malformed: only each so-many-th case")
    parser.add_argument("--skip", default="", help="malformed: pattern of cases to leave out")
    parser.add_argument("--times", type=int, default=0, help="kills (10), startstop (100): repetitions")
    parser.add_argument("--roles", default="", help="kills: only processes whose name contains it")
    seconds = float(os.environ.get("SOAK") or 3600)
    parser.add_argument("--seconds", type=float, default=seconds, help="soak: how long (SOAK)")
    parser.add_argument("--workers", type=int, default=24, help="soak: clients at once")
    parser.set_defaults(names=[])
    return parser


def _repositories(arguments: argparse.Namespace) -> dict[str, Path]:
    unknown = set(arguments.names) - {*_WHOLE, "soak"}
    if unknown:
        raise AssaultError(f"no attack is called {', '.join(sorted(unknown))}")
    if arguments.repository is not None:
        return {arguments.repository.parent.name or "repository": arguments.repository}
    return {recipe: build(recipe, arguments.out) for recipe in ("demo-fp32", "demo-int4awq")}


def _meant_for(name: str, repositories: Mapping[str, Path], arguments: argparse.Namespace) -> list[tuple[str, Path]]:
    """The repositories that an attack needs: all for load; what has nothing to do with arithmetic, only the first."""
    given = list(repositories.items())
    if name == "ladder":
        exact = [(title, path) for title, path in given if is_exact(path)]
        without = [(f"{t} without reuse", without_reuse(p, arguments.out / f"{t}-no-reuse")) for t, p in exact]
        return given + without
    if name == "kills" and arguments.tp2 and arguments.repository is None:
        return [given[0], ("demo-fp32 tp 2", build("demo-fp32", arguments.out, "parallel.tp=2"))]
    return given if name == "departures" else given[:1]


def _end(number: int, frame: FrameType | None) -> None:
    """Ends as an exception does, so that servers are closed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
