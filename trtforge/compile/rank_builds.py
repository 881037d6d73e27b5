"""Build the ranks of one engine, each in its own directory, and move finished ranks into the engine."""

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtforge.compile.build_site import BUILD_CONFIG, ENGINE, lanes
from trtforge.compile.engine_agreement import check_config
from trtforge.compile.engine_build import EngineBuild, rank_directory
from trtforge.compile.engine_files import add_runtime_defaults, check_rank, engine_file
from trtforge.compile.inside.rank import STEP_FILE, STEPS
from trtforge.compile.jobs import Job, Observer, run_jobs
from trtforge.compile.timing_cache import TimingCache
from trtforge.core.manifest import FileRecord, record_of
from trtforge.core.partial import Finished, Group
from trtforge.core.progress import Bar, Progress

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankJob(Job):
    """The build of one rank; `steps` shows its progress."""

    rank: int
    steps: "Steps"


def build_ranks(
    build: EngineBuild, directory: Path, gpus: Sequence[str], timings: TimingCache, progress: Progress
) -> Mapping[str, FileRecord]:
    """Build the ranks of the engine in its partial `directory`, except those that an earlier run finished.

    Returns the records of the new files. Raises LoggedError for a rank that fails, ForgeError for one that differs
    from the plan.
    """
    finished = Finished.read(directory).names
    missing = [rank for rank in build.ranks if engine_file(rank) not in finished]
    ranks = _Ranks(build, directory, timings)
    with progress.bars([f"Rank {rank}" for rank in missing], len(STEPS), "steps") as bars:
        steps = dict(zip(missing, map(Steps, bars), strict=True))
        dealt = lanes(missing, gpus, build.workers)
        run_jobs([[ranks.job(rank, gpu, steps[rank]) for rank in lane] for gpu, lane in dealt], ranks)
    return ranks.records


class _Ranks(Observer[RankJob]):
    """Prepares the build of each rank and collects its result."""

    def __init__(self, build: EngineBuild, directory: Path, timings: TimingCache) -> None:
        self._build, self._directory, self._timings = build, directory, timings
        self.records: dict[str, FileRecord] = {}

    def job(self, rank: int, gpu: str, steps: "Steps") -> RankJob:
        directory = rank_directory(self._directory, rank)
        return RankJob(
            name=f"rank {rank}",
            run=self._build.place.rank(rank, gpu, self._build.checkpoint, directory),
            directory=directory,
            log=self._build.logs / f"rank{rank}.log",
            rank=rank,
            steps=steps,
        )

    def begin(self, job: RankJob) -> None:
        job.directory.mkdir()
        (job.directory / BUILD_CONFIG).write_text(json.dumps(self._build.build_config, indent=2) + "\n")
        self._timings.give(job.directory)

    def look(self, job: RankJob) -> None:
        job.steps.read(job.directory)

    def finished(self, job: RankJob) -> None:
        job.steps.reach(len(STEPS))
        if job.rank == 0:  # only rank 0 writes the timing cache
            self._timings.take(job.directory)
        files = self._take(job)
        Finished.read(self._directory).add(Group(made_from=self._build.digest, files=files))
        self.records |= files

    def _take(self, job: RankJob) -> dict[str, FileRecord]:
        """Move a rank's files into the engine. Every rank writes the adapters; the first copy is kept."""
        made = job.directory / ENGINE
        names = check_rank(made, job.rank)
        if job.rank == 0:
            for warning in check_config(made, self._build.plan, self._build.model):
                _LOG.warning(warning)
            add_runtime_defaults(made, self._build.plan)
        taken = {}
        for name in names:
            place = self._directory / name
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(made / name, place)
                taken[name] = record_of(place)
        shutil.rmtree(job.directory)
        return taken


class Steps:
    """The progress of a rank, shown as a bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._reached = bar, 0

    def read(self, directory: Path) -> None:
        """Read the rank's step file, which may be missing or incomplete."""
        with suppress(OSError, ValueError):
            self.reach(int((directory / STEP_FILE).read_text()))

    def reach(self, step: int) -> None:
        """Step number `step` is running; a number past the last step means done."""
        if step > self._reached:
            self._bar.advance(step - self._reached)
            self._reached = step
        self._bar.describe(STEPS[step] if step < len(STEPS) else "done")
