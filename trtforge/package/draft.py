"""The draft engine of a repository: a smaller engine of the same backend, whose tokens the served engine verifies.

Triton runs both, and the text models pass the draft tokens on (`drafted_engine` and, for embedded engines,
`drafted_served` in the templates' lib).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest
from trtforge.core.serving import ServingConfig
from trtforge.formats.foreign import engine_manifest
from trtforge.formats.trtllm import CONFIG_FILE
from trtforge.package.config import PackageConfig
from trtforge.package.engine_facts import EngineFacts, read_engine
from trtforge.package.target import check_target


@dataclass(frozen=True)
class DraftEngine:
    """A draft engine and its packaging: the settings of the served engine that do not depend on the network."""

    directory: Path
    manifest: Manifest
    facts: EngineFacts
    config: PackageConfig


def read_draft(config: PackageConfig, served: EngineFacts) -> DraftEngine | None:
    """The draft engine that the settings name. Raises ForgeError for one that cannot draft for the served engine."""
    named = config.serving.draft_engine
    if named is None:
        return None
    directory = _engine_at(Path(named))
    manifest = engine_manifest(directory)
    facts = read_engine(directory, manifest)
    where = f"serving.draft_engine: {directory}"
    if facts.backend != served.backend:
        kind = "an embedded engine" if served.backend == "torch" else "a TensorRT engine"
        raise ForgeError(
            f"{where} is not {kind}, but the served engine is", hint=f"Compile it with --backend {served.backend}."
        )
    for name, own, other in (
        ("TensorRT-LLM", served.served_by, facts.served_by),
        ("a vocabulary of", served.vocab_size, facts.vocab_size),
    ):
        if own != other:
            raise ForgeError(
                f"{where} has {name} {other}, the served engine {own}: both engines must have the same",
                hint="Compile a draft model with the same tokenizer for the same release.",
            )
    if not config.serving.draft_gpu_device_ids and facts.world_size > served.world_size:
        raise ForgeError(
            f"{where} has {facts.world_size} ranks, the served engine {served.world_size}",
            hint="Set serving.draft_gpu_device_ids to the draft engine's GPUs.",
        )
    gpus = config.serving.draft_gpus
    if gpus and len(gpus) != facts.world_size:
        raise ForgeError(
            f"serving.draft_gpu_device_ids has {len(gpus)} ids, the draft engine {facts.world_size} ranks",
            hint="Give an id for each rank.",
        )
    return DraftEngine(directory, manifest, facts, _config(config))


def _engine_at(place: Path) -> Path:
    """The engine directory of `place`, which is an engine or a build directory."""
    inside = place / "engine"
    return inside if inside.is_dir() and not (place / CONFIG_FILE).is_file() else place


def draft_warnings(draft: DraftEngine, config: PackageConfig) -> Iterator[str]:
    """Warnings about a draft engine. Raises ForgeError if it cannot run on the target."""
    yield from check_target(draft.facts, config.target)
    if not draft.facts.features.kv_reuse:
        yield (
            f"{draft.directory} was built without kv_reuse: it computes the whole prompt again for each draft. Compile "
            "it with --feature kv_reuse."
        )


def _config(config: PackageConfig) -> PackageConfig:
    serving = config.serving
    shared = {
        name: getattr(serving, name)
        for name in ("streaming", "scheduler", "kv_cache_fraction", "kv_cache_tokens", "max_queue_size")
    }
    own = ServingConfig(**shared, gpu_device_ids=serving.draft_gpu_device_ids)
    return config.model_copy(update={"serving": own, "features": None, "kv_reuse": None, "chunked_context": None})
