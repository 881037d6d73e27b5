"""The artifacts that commands name by the build directory they are in."""

from pathlib import Path
from shlex import join

from trtforge.core import places
from trtforge.core.builds import REPORT_FILE
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FILE_NAME, Stage


def artifact_at(place: Path, *stages: Stage) -> Path:
    """As `core.places.artifact_at`.

    Also raises ForgeError if `place` is a build without the artifact whose gate failed, or a model instead of a
    repository.
    """
    found = places.artifact_at(place, *stages)
    if stages == ("repository",):
        _refuse_model(found)
    if not (found / FILE_NAME).is_file() and (found / REPORT_FILE).is_file():
        require_gate(found, stages[0])
    return found


def _refuse_model(place: Path) -> None:
    from trtforge.formats.trtllm import is_hugging_face

    if (place / "config.json").is_file() and is_hugging_face(place):
        run, build = (join(["trtforge", command, str(place)]) for command in ("run", "build"))
        raise ForgeError(
            f"{place} is a model, not a Triton model repository",
            hint=f"`{run}` builds, serves and asks it; `{build}` builds it and prints the command that serves it.",
        )


def require_gate(build: Path, stage: Stage) -> None:
    """Raises ForgeError if the build has no artifact of `stage` because its quality gate failed."""
    from trtforge.pipeline.record import read_record

    record = read_record(build)
    quality = record.verification
    if quality is None or quality.passed:
        return
    raise ForgeError(
        f"{build} has no {stage}: its quality gate failed ({'; '.join(quality.failures)})",
        hint=f"Find the cause: `{record.next}`. Build it in another format, or with another gate (gate in its recipe).",
    )


def build_of(place: Path) -> Path | None:
    """The build directory that `place` is, or whose repository it is; None for a repository alone."""
    from trtforge.pipeline.paths import Paths

    build = place.resolve().parent if (place / FILE_NAME).is_file() else place
    whole = Paths(build).report.is_file()
    return build if whole and place.resolve() in (build.resolve(), Paths(build).repository.resolve()) else None
