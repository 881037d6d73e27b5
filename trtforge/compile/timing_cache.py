"""TensorRT's timing cache, kept between builds, so that a kernel is timed only once per GPU.

`build()` reads `input_timing_cache` if that file exists, and rank 0 writes `output_timing_cache`
(tensorrt_llm/builder.py). Both are relative to the rank's working directory: so parallel ranks share no file, and an
engine's config.json contains no path of this machine.
"""

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from trtforge.core.cache import cache_directory
from trtforge.core.timings import timings_path
from trtforge.formats.engine_target import EngineTarget

FILE_NAME = "model.cache"
SETTINGS: dict[str, JsonValue] = {"input_timing_cache": FILE_NAME, "output_timing_cache": FILE_NAME}
"""Timing cache fields of BuildConfig."""


@dataclass(frozen=True)
class TimingCache:
    """The timing cache of one GPU and TensorRT version. `kept`: its file; None if there is no cache."""

    kept: Path | None

    @classmethod
    def of(cls, target: EngineTarget) -> "TimingCache":
        """The user's timing cache for `target`. TensorRT accepts only timings of the same version and GPU."""
        directory = cache_directory()
        if directory is None:
            return cls(None)
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"tensorrt {target.tensorrt} sm {target.sm} {target.gpu}")
        return cls(timings_path(directory, name))

    def give(self, directory: Path) -> None:
        """Copy the timing cache to a rank's directory; errors are ignored, they only cost time."""
        if self.kept is not None:
            with suppress(OSError):
                shutil.copyfile(self.kept, directory / FILE_NAME)
                os.utime(self.kept)  # the last use, for `trtforge cache prune`

    def take(self, directory: Path) -> None:
        """Store the timing cache of rank 0 atomically; of parallel builds, the last one wins."""
        made = directory / FILE_NAME
        if self.kept is None or not made.is_file():
            return
        with suppress(OSError):
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            draft = self.kept.with_name(f".{self.kept.name}.{os.getpid()}")
            shutil.copyfile(made, draft)
            os.replace(draft, self.kept)
