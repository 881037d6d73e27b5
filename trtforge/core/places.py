"""A build directory is accepted wherever one of its artifacts is, and a repository where its engine is."""

from pathlib import Path
from shlex import join

from trtforge.core.builds import REPORT_FILE, require_one_build
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FILE_NAME, Stage


def artifact_at(place: Path, *stages: Stage) -> Path:
    """`place`, or its first artifact of these stages that exists, if it is a build directory or holds an engine.

    Raises ForgeError if it holds several builds, is a build whose gate does not hold, or a model instead of a
    repository.
    """
    if (place / "config.json").is_file():
        if stages == ("repository",):
            _refuse_model(place)
        return place
    require_one_build(place, *stages)
    inside = [place / stage for stage in stages if not (place / FILE_NAME).is_file()]
    if "engine" in stages and "repository" not in stages:
        inside += sorted(place.glob("*tensorrt_llm/1/engine"))
    found = next((found for found in inside if (found / FILE_NAME).is_file()), None)
    if found is None and (place / REPORT_FILE).is_file():
        _require_gate(place, stages[0])
    return found or place


def _refuse_model(place: Path) -> None:
    from trtforge.formats.trtllm import is_hugging_face

    if is_hugging_face(place):
        run, build = (join(["trtforge", command, str(place)]) for command in ("run", "build"))
        raise ForgeError(
            f"{place} is a model, not a Triton model repository",
            hint=f"`{run}` builds, serves and asks it; `{build}` builds it and prints the command that serves it.",
        )


def _require_gate(build: Path, stage: Stage) -> None:
    """Raises ForgeError if the build ended because its quality gate does not hold."""
    from trtforge.pipeline.record import read_record

    record = read_record(build)
    quality = record.verification
    if quality is None or quality.passed:
        return
    raise ForgeError(
        f"{build} has no {stage}: its quality gate does not hold ({'; '.join(quality.failures)})",
        hint=f"Find the cause: `{record.next}`. Build it in another format, or with another gate (gate in its recipe).",
    )
