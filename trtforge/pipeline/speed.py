"""Floor 5: bench.json, the measured speed of a build, kept beside its report; valid while the repository is unchanged.

The file names the machine and records how busy it was before the measurement.
"""

import os
from datetime import datetime, timezone
from pathlib import Path

from trtforge import __version__
from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.manifest import read_manifest
from trtforge.core.replace import replace_text
from trtforge.machine.host import Host
from trtforge.machine.processor import processor_name
from trtforge.pipeline.paths import Paths
from trtforge.serve.host_checks import visible_gpus
from trtforge.serve.speed import Speed


class Measured(Config, extra="ignore"):
    """One measurement. `repository`: digest of the served repository; `busy`: mean number of processors in use before.

    `measured`: ISO 8601.
    """

    speed: Speed
    repository: str
    machine: str
    busy: float | None
    trtforge: str
    measured: str


def keep_speed(build: Path, speed: Speed, machine: str, busy: float | None) -> Path:
    """Write the speed of a build's repository beside its report; returns the file. Raises ForgeError."""
    paths = Paths(build)
    manifest = read_manifest(paths.repository)
    assert manifest is not None
    found = Measured(
        speed=speed,
        repository=manifest.digest,
        machine=machine,
        busy=busy,
        trtforge=__version__,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    try:
        replace_text(paths.speed, found.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ForgeError(f"{paths.speed}: {error.strerror}", hint="Make the build directory writable.") from None
    return paths.speed


def kept_speed(build: Path) -> Measured | None:
    """The measured speed of a build directory; None if there is none or the repository has changed since.

    Raises ForgeError for a damaged file.
    """
    paths = Paths(build)
    if not paths.speed.is_file():
        return None
    found = Measured.parse(
        read_json_object(paths.speed, hint=f"Delete it, or measure again: trtforge bench {build}."), str(paths.speed)
    )
    manifest = read_manifest(paths.repository)
    return found if manifest is not None and manifest.digest == found.repository else None


def this_machine(host: Host | None = None) -> str:
    """The processor and the visible GPUs in words: 2 cores of AMD EPYC 9B14, 1 x NVIDIA H100 80GB HBM3."""
    host = host or Host()
    name = processor_name(host)
    parts = [f"{host.cpus} cores" + (f" of {name}" if name else "")]
    gpus = [gpu.name for gpu in visible_gpus(host.load_nvml, host.environment.get("CUDA_VISIBLE_DEVICES")) or ()]
    parts += [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
    return ", ".join(parts)


def busy_processors() -> float | None:
    """The processors that were in use over the last minute; None if the system does not report it."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None
