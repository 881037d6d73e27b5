"""Write an engine of the llmapi backend from its plan."""

from collections.abc import Mapping
from pathlib import Path

from trtforge.compile.llmapi import LlmapiPlan
from trtforge.compile.llmapi_sources import (
    Beside,
    CheckpointSource,
    HuggingFaceSource,
    Source,
    identity_of,
    write_engine,
)
from trtforge.core.artifact import Produced, produce
from trtforge.core.manifest import FileRecord
from trtforge.core.progress import Progress, Silent
from trtforge.formats.foreign import checkpoint_manifest
from trtforge.formats.hf import TOKENIZER_DIRECTORY, HfConfig
from trtforge.formats.tokenizer import require_tokenizer
from trtforge.formats.trtllm import read_checkpoint_config


def write_llmapi_engine(
    plan: LlmapiPlan, checkpoint: Path, out: Path, *, force: bool = False, progress: Progress | None = None
) -> Produced:
    """Write the planned llmapi engine at `out`, or reuse it."""
    source: Source
    if plan.made_from == "hugging_face":
        source = HuggingFaceSource.open(checkpoint)
        require_tokenizer(checkpoint, _vocabulary(source.checkpoint.config))
    else:
        manifest = checkpoint_manifest(checkpoint)
        model = read_checkpoint_config(checkpoint)
        require_tokenizer(checkpoint / TOKENIZER_DIRECTORY, model.vocab_size)
        source = CheckpointSource.open(checkpoint, manifest, model)

    beside = Beside.open(plan)

    def write(directory: Path) -> Mapping[str, FileRecord]:
        return write_engine(plan, source, beside, directory, progress or Silent())

    return produce(out, identity_of(plan, source, beside), write, force=force)


def _vocabulary(config: HfConfig) -> int | None:
    """The vocabulary size from config.json or its text_config; None if not given."""
    text = config.values.get("text_config")
    found = text.get("vocab_size") if isinstance(text, dict) else config.values.get("vocab_size")
    return found if isinstance(found, int) and not isinstance(found, bool) else None
