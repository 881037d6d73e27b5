"""An engine of backend llmapi, written as it was planned."""

from collections.abc import Mapping
from pathlib import Path

from trtforge.compile.llmapi import LlmapiPlan
from trtforge.compile.llmapi_sources import CheckpointSource, HuggingFaceSource, Source, identity_of, write_engine
from trtforge.core.artifact import Produced, produce
from trtforge.core.manifest import FileRecord, open_artifact
from trtforge.core.progress import Progress, Silent
from trtforge.formats.trtllm import read_checkpoint_config


def write_llmapi_engine(
    plan: LlmapiPlan, checkpoint: Path, out: Path, *, force: bool = False, progress: Progress | None = None
) -> Produced:
    """Write an llmapi engine by its plan at `out`, or find it there."""
    source: Source
    if plan.made_from == "hugging_face":
        source = HuggingFaceSource.open(checkpoint)
    else:
        manifest = open_artifact(checkpoint, "checkpoint")
        source = CheckpointSource.open(checkpoint, manifest, read_checkpoint_config(checkpoint))

    def write(directory: Path) -> Mapping[str, FileRecord]:
        return write_engine(plan, source, directory, progress or Silent())

    return produce(out, identity_of(plan, source), write, force=force)
