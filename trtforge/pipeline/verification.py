"""Floor 5: the verification of a build's checkpoint, kept as an artifact whose metrics later runs reuse.

The artifact holds metrics, not a verdict: the gate's limits are applied when it is read. It does not depend on how the
engine is compiled or served, so builds of the same checkpoint in other directories take it from the cache.
"""

import json
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trtforge import __version__
from trtforge.compile.about import about_checkpoint
from trtforge.core.artifact import Origin, produce
from trtforge.core.cache import cache_for
from trtforge.core.digest import text_digest
from trtforge.core.json_text import read_json_object
from trtforge.core.manifest import Identity, Manifest, check_files, is_foreign, open_artifact, read_manifest
from trtforge.core.progress import Progress
from trtforge.core.recipe import LIMITS, GateConfig
from trtforge.formats.corpus import content_of
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.pipeline.metrics import METRICS_FILE, CheckpointMetrics
from trtforge.pipeline.report import weight_compression
from trtforge.verify.result import Verification
from trtforge.verify.stage import verify


def verified(
    checkpoint: Path, source: Callable[[], Path], gate: GateConfig, out: Path, *, force: bool, progress: Progress
) -> tuple[CheckpointMetrics, Origin]:
    """Verify `checkpoint` against the Hugging Face checkpoint, or take the metrics at `out` or from the cache
    if checkpoint, evaluation data and versions are the same. The gate's limits are applied to all.

    Returns the metrics and their origin. Raises ForgeError as `verify` does.
    """

    def write(directory: Path) -> dict[str, Any]:
        found = verify(checkpoint, source(), gate, layers=True, progress=progress)
        metrics = CheckpointMetrics(
            verification=found.model_copy(update={"failures": ()}), compression=weight_compression(checkpoint)
        )
        (directory / METRICS_FILE).write_text(json.dumps(metrics.model_dump(mode="json"), indent=2) + "\n")
        return {}

    manifest = open_artifact(checkpoint, "checkpoint")
    # the digest of a foreign checkpoint does not cover the model that it was made from
    cache = None if is_foreign(manifest) else cache_for(about_checkpoint(read_checkpoint_config(checkpoint)))
    produced = produce(out, _identity(manifest, gate), write, force=force, cache=cache)
    return _read(out, gate), produced.origin


def known_metrics(checkpoint: Path, gate: GateConfig, out: Path) -> CheckpointMetrics | None:
    """The metrics at `out`, judged by `gate`, if they are of this checkpoint and the gate's data; None otherwise.

    Compares manifests, not weights.
    """
    manifest = read_manifest(checkpoint)
    found = read_manifest(out) if out.is_dir() else None
    if manifest is None or found is None or found.identity != _identity(manifest, gate):
        return None
    if check_files(out, found) is not None:
        return None
    return _read(out, gate)


def _read(directory: Path, gate: GateConfig) -> CheckpointMetrics:
    path = directory / METRICS_FILE
    again = f"Delete {directory} and build again."
    stored = CheckpointMetrics.parse(read_json_object(path, hint=again), str(path))
    return stored.model_copy(update={"verification": stored.verification.judged_by(gate)})


def _identity(checkpoint: Manifest, gate: GateConfig) -> Identity:
    """Everything that determines the metrics: checkpoint, samples, the content of their data, and program versions."""
    return Identity(
        stage="verification",
        config=gate.model_dump(mode="json", exclude={"data", *LIMITS}) | {"metrics": sorted(Verification.model_fields)},
        inputs={"checkpoint": checkpoint.digest, "data": data_digest(gate.data)},
        versions={"trtforge": __version__, "transformers": version("transformers"), "torch": version("torch")},
    )


def data_digest(data: str) -> str:
    """Hex BLAKE3 that identifies the text that `data` names now; of its name if the hub does not give its commit."""
    return content_of(data) or text_digest(f"{data} of Python {platform.python_version()}")
