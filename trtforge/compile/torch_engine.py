"""Build an engine of the embedded runtime: a checkpoint's rank files, packed for the device's kernels."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from trtforge import __version__
from trtforge.compile.about import about_checkpoint
from trtforge.compile.torch import TorchPlan, build_rank, copy_adapters
from trtforge.core.artifact import Produced, produce
from trtforge.core.cache import cache_for
from trtforge.core.clone import copy_directory
from trtforge.core.digest import file_digest
from trtforge.core.manifest import FileRecord, Identity, open_artifact
from trtforge.core.progress import Progress
from trtforge.formats.adapter import adapter_files
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.trtllm import CONFIG_FILE, DRAFT_ENGINE, rank_file


def build_torch_engine(
    plan: TorchPlan, checkpoint: Path, digest: str, target: str, out: Path, *, force: bool, progress: Progress
) -> Produced:
    """Build the engine of `checkpoint`, whose manifest has `digest`, or reuse it from `out`.

    `target`: the TensorRT-LLM release whose schema config.json follows.
    """
    identity = Identity(
        stage="engine",
        config=plan.identity() | {"target": target},
        inputs={"checkpoint": digest}
        | ({} if plan.draft is None else {"draft": open_artifact(plan.draft, "engine").digest})
        | (plan.beside.digests if plan.beside is not None else {})
        | {f"{place}/{path.name}": file_digest(path) for place, path in adapter_files(plan.adapters)},
        versions={"trtforge": __version__, "torch": _torch_version()},
    )

    def write(directory: Path) -> Mapping[str, FileRecord]:
        (directory / CONFIG_FILE).write_text(plan.config_json(target=target))
        if (checkpoint / TOKENIZER_DIRECTORY).is_dir():  # so that the engine can be packaged without the checkpoint
            copy_directory(checkpoint / TOKENIZER_DIRECTORY, directory / TOKENIZER_DIRECTORY)
        if plan.draft is not None:
            (directory / DRAFT_ENGINE).mkdir()
            for file in (plan.draft / CONFIG_FILE, *plan.draft.glob(rank_file("*"))):
                shutil.copy(file, directory / DRAFT_ENGINE)
        copy_adapters(plan, directory)
        if plan.beside is not None:
            plan.beside.copy(plan.model, checkpoint, directory)
        ranks = plan.model.parallel.ranks
        with progress.bar("Compiling", len(ranks), "ranks") as bar:
            for rank in ranks:
                build_rank(plan, checkpoint, rank.index, directory / rank_file(rank.index))
                bar.advance(1)
        return {}

    return produce(out, identity, write, force=force, cache=cache_for(about_checkpoint(plan.model, "torch")))


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
