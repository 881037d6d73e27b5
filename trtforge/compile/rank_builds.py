"""The ranks of one engine, each built in a directory of its own and then moved beside those that are finished."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from trtforge.compile.build_config import BuildPlan
from trtforge.compile.engine_files import check_config, check_rank, engine_file
from trtforge.compile.inside.rank import STEP_FILE, STEPS
from trtforge.compile.jobs import Job, run_jobs
from trtforge.compile.place import BUILD_CONFIG, ENGINE, Place, lanes
from trtforge.compile.timing_cache import TimingCache
from trtforge.core.manifest import FileRecord, record_of
from trtforge.core.partial import Finished, Group
from trtforge.core.progress import Bar, Progress
from trtforge.formats.trtllm import CheckpointConfig


@dataclass(frozen=True)
class RankJob(Job):
    """The build of one rank; `bar` shows its steps."""

    rank: int
    bar: "Steps"


@dataclass(frozen=True)
class RankBuilds:
    """The ranks of an engine of `model` that grows in `directory`, an artifact's partial one."""

    plan: BuildPlan
    model: CheckpointConfig
    checkpoint: Path
    directory: Path
    place: Place
    timings: TimingCache
    logs: Path

    def run(
        self,
        gpus: Sequence[str],
        workers: int,
        build_config: Mapping[str, JsonValue],
        made_from: str,
        progress: Progress,
    ) -> Mapping[str, FileRecord]:
        """Build all ranks but those that an earlier run finished; the records of what was written now.

        Raises LoggedError for a rank that fails, ForgeError for one that is not as planned.
        """
        there = Finished.read(self.directory).names
        missing = [rank for rank in range(self.model.parallel.world_size) if engine_file(rank) not in there]
        records: dict[str, FileRecord] = {}

        def finish(job: RankJob) -> None:
            job.bar.reach(len(STEPS))
            if job.rank == 0:  # the one that writes timings; the others only read theirs
                self.timings.take(job.directory)
            group = Group(made_from=made_from, files=self._take(job))
            Finished.read(self.directory).add(group)
            records.update(group.files)

        with progress.bars([f"Rank {rank}" for rank in missing], len(STEPS), "steps") as bars:
            steps = dict(zip(missing, map(Steps, bars), strict=True))
            run_jobs(
                [
                    [self._job(rank, gpu, build_config, steps[rank]) for rank in ranks]
                    for gpu, ranks in lanes(missing, gpus, workers)
                ],
                finished=finish,
                watch=lambda job: job.bar.read(job.directory),
            )
        return records

    def _job(self, rank: int, gpu: str, build_config: Mapping[str, JsonValue], steps: "Steps") -> RankJob:
        directory = rank_directory(self.directory, rank)
        directory.mkdir()
        (directory / BUILD_CONFIG).write_text(json.dumps(build_config, indent=2) + "\n")
        self.timings.give(directory)
        return RankJob(
            name=f"rank {rank}",
            run=self.place.rank(rank, gpu, self.checkpoint, directory),
            directory=directory,
            log=self.logs / f"rank{rank}.log",
            rank=rank,
            bar=steps,
        )

    def _take(self, job: RankJob) -> dict[str, FileRecord]:
        """Move what the rank wrote to the engine. Every rank copies the adapters: the first copy is kept."""
        made = job.directory / ENGINE
        names = check_rank(made, job.rank)
        if job.rank == 0:
            check_config(made, self.plan, self.model)
        taken = {}
        for name in names:
            place = self.directory / name
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(made / name, place)
                taken[name] = record_of(place)
        shutil.rmtree(job.directory)
        return taken


class Steps:
    """How far a rank says it is, shown as a bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar, self._reached = bar, 0

    def read(self, directory: Path) -> None:
        """Look at what the rank's program wrote; there may be nothing yet, or half of it."""
        with suppress(OSError, ValueError):
            self.reach(int((directory / STEP_FILE).read_text()))

    def reach(self, step: int) -> None:
        """Step number `step` is under way; past the last one all are done."""
        if step > self._reached:
            self._bar.advance(step - self._reached)
            self._reached = step
        self._bar.describe(STEPS[step] if step < len(STEPS) else "done")


def rank_directory(partial: Path, rank: int) -> Path:
    """Where a rank of the engine in `partial` is built."""
    return partial / f".rank{rank}"
