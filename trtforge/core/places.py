"""Resolves a build directory to one of its artifacts, and a repository to its engine."""

from pathlib import Path

from trtforge.core.builds import require_one_build
from trtforge.core.manifest import FILE_NAME, Stage


def artifact_at(place: Path, *stages: Stage) -> Path:
    """`place`, or its first existing artifact of these stages if it is a build directory or contains an engine.

    Raises ForgeError if it contains several builds.
    """
    if (place / "config.json").is_file():
        return place
    require_one_build(place, *stages)
    inside = [place / stage for stage in stages if not (place / FILE_NAME).is_file()]
    if "engine" in stages and "repository" not in stages:
        inside += sorted(place.glob("*tensorrt_llm/1/engine"))
    return next((found for found in inside if (found / FILE_NAME).is_file()), place)
