"""TensorRT's timings of kernels, kept between builds: a kernel that was timed on a GPU is not timed there again.

`build()` reads the file that `input_timing_cache` names, where it exists, and rank 0 writes `output_timing_cache`
(tensorrt_llm/builder.py). Both are a name in the rank's own working directory, so that ranks side by side share no
file and no path of this machine gets into an engine's config.json.
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
"""The fields of BuildConfig."""


@dataclass(frozen=True)
class TimingCache:
    """The timings of one GPU and TensorRT. `kept` None: nothing is kept."""

    kept: Path | None

    @classmethod
    def of(cls, target: EngineTarget) -> "TimingCache":
        """The user's own for `target`. TensorRT takes timings only from its own version on the same GPU."""
        directory = cache_directory()
        if directory is None:
            return cls(None)
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"tensorrt {target.tensorrt} sm {target.sm} {target.gpu}")
        return cls(timings_path(directory, name))

    def give(self, directory: Path) -> None:
        """Put the timings where a rank reads them. A cache that cannot be read costs time only."""
        if self.kept is not None:
            with suppress(OSError):
                shutil.copyfile(self.kept, directory / FILE_NAME)
                os.utime(self.kept)  # `trtforge cache prune` goes by the last use

    def take(self, directory: Path) -> None:
        """Keep what rank 0 left, as one whole file: of builds side by side the last one's counts."""
        made = directory / FILE_NAME
        if self.kept is None or not made.is_file():
            return
        with suppress(OSError):
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            draft = self.kept.with_name(f".{self.kept.name}.{os.getpid()}")
            shutil.copyfile(made, draft)
            os.replace(draft, self.kept)
