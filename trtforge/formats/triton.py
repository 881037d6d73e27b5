"""The five models of an in-flight batching repository: tensors, ensemble mapping, parameters.

They come from `release_data/triton-model-config.json`, for the release that serves the engine. `RepositoryFacts`
describes a packaged repository to launchers and clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.device import UsableDevice
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest
from trtforge.core.recipe import ResolvedBackend
from trtforge.formats.engine_target import EngineTarget
from trtforge.formats.releases import Confidence, Problem, Release, follows_engines, read_release_data, release

CONFIG_FILE = "config.pbtxt"
"""Name of a model's configuration in a Triton model repository."""

ModelRole = Literal["ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"]
DRAFT_MODEL = "tensorrt_llm_draft"
"""Name of the engine model with the draft engine, beside those of the roles."""
ROLES: tuple[ModelRole, ...] = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")

Direction = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class DtypeChoices:
    """Values of the template's data type placeholders: the engine's logits, prompt table and encoder types."""

    logits: str = "TYPE_FP32"
    prompt_table: str = "TYPE_FP16"
    encoder_features: str = "TYPE_FP16"

    def resolve(self, dtype: str) -> str:
        """`dtype` with its placeholder filled."""
        return {
            "${logits_datatype}": self.logits,
            "${prompt_embedding_table_data_type}": self.prompt_table,
            "${encoder_input_features_data_type}": self.encoder_features,
        }.get(dtype, dtype)


@dataclass(frozen=True)
class Tensor:
    """One input or output. `dims`: without the batch dimension; `scalar`: `reshape` drops the last dimension."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool
    scalar: bool
    ragged: bool


@dataclass(frozen=True)
class Parameter:
    """A parameter of config.pbtxt. `required`: its key must be present, even if empty; `literal`: a fixed value."""

    key: str
    required: bool
    literal: str | None


@dataclass(frozen=True)
class TextFlow:
    """How a text request becomes an engine request, as pairs of names (its own, the next model's).

    `text_to_preprocessing`: the request's tensors to preprocessing's; `preprocessing_to_engine`, `text_to_engine`:
    those of preprocessing and of the request to the engine's; `engine_to_text`: the engine's outputs that pass through.
    """

    text_to_preprocessing: tuple[tuple[str, str], ...]
    preprocessing_to_engine: tuple[tuple[str, str], ...]
    text_to_engine: tuple[tuple[str, str], ...]
    engine_to_text: tuple[tuple[str, str], ...]


class RepositoryFacts(Config):
    """Facts of a packaged repository for launchers and clients; part of its `forge.json`."""

    backend: ResolvedBackend
    device: UsableDevice = Field(description="What the engine runs on.")
    tensorrt_llm: str = Field(description="Release that serves; for the embedded engine, whose interface it has.")
    world_size: int = Field(description="Processes that run the engine.")
    prefix: str = Field("", description="Prefix of the model names.")
    streaming: bool = True
    max_batch_size: int = 1
    concurrency: int = Field(1, description="Threads of a text model, in repositories packaged by trtforge 0.1.")
    gpus: tuple[tuple[int, ...], ...] = Field((), description="GPUs of the instances; empty: not chosen.")
    participants: tuple[tuple[int, ...], ...] = Field((), description="MPI ranks of the instances; empty: not chosen.")
    draft_ranks: int = Field(0, description="Processes that run the draft engine; 0: there is none.")
    draft_gpus: tuple[int, ...] = Field((), description="GPUs of the draft engine; empty: not chosen.")
    engine_path: str = Field(description="gpt_model_path as config.pbtxt has it.")
    adapters: dict[str, int] = Field({}, description="Task ids of the engine's LoRA adapters, by name.")
    target: EngineTarget = Field(EngineTarget(), description="What a TensorRT-LLM engine was built with and for.")
    kv_bytes: int = Field(
        0,
        ge=0,
        description="On the CPU: bytes of the KV caches for kv_cache_tokens, of all ranks; 0: not set or unknown.",
    )
    host_bytes: int = Field(0, ge=0, description="Host memory of each rank for KV blocks and LoRA adapters, in bytes.")

    def recorded(self) -> dict[str, Any]:
        """The content for the manifest."""
        optional = ("adapters", "draft_ranks", "draft_gpus", "kv_bytes", "host_bytes")
        return self.model_dump(mode="json", exclude={name for name in optional if not getattr(self, name)})

    @property
    def instances(self) -> int:
        """Instances of the engine."""
        return max(1, len(self.gpus))

    @property
    def gpu_count(self) -> int:
        """GPUs that must be visible to the server: the number of an instance's ranks, or up to the highest chosen."""
        chosen = [gpu for instance in (*self.gpus, self.draft_gpus) for gpu in instance]
        return max(1 + max(chosen, default=0), self.draft_ranks, 0 if self.gpus else self.world_size)

    @property
    def ranks(self) -> int:
        """Processes that run the engine, of all instances."""
        return self.instances * self.world_size

    @property
    def orchestrated(self) -> bool:
        """Whether the server is not a rank itself but starts or leads the ranks (orchestrator mode)."""
        drafted = self.draft_ranks > 0 and max(self.world_size, self.draft_ranks) > 1
        return self.backend == "tensorrt_llm" and (self.instances > 1 or bool(self.participants) or drafted)

    @property
    def draft_model(self) -> str | None:
        """The name of the engine model with the draft engine; None without one."""
        return self.prefix + DRAFT_MODEL if self.draft_ranks else None

    @property
    def engine_models(self) -> tuple[str, ...]:
        """The names of the engine models."""
        return tuple(filter(None, (self.model("tensorrt_llm"), self.draft_model)))

    def model(self, role: ModelRole) -> str:
        """The name under which a model is served."""
        return self.prefix + role


def read_facts(manifest: Manifest) -> RepositoryFacts:
    """The facts in a repository's manifest. Raises ForgeError if they are missing or invalid."""
    values = manifest.identity.config.get("repository")
    if not isinstance(values, dict):
        raise ForgeError("forge.json does not describe the repository", hint="Run `trtforge package` again.")
    try:
        return RepositoryFacts.parse(values, "forge.json: repository")
    except ForgeError as error:
        packaged = manifest.identity.versions.get("trtforge")
        raise ForgeError(
            f"{error.message}: trtforge {packaged} packaged it", hint="Run `trtforge package` again."
        ) from None


def newest_release() -> Release:
    """The last release with engines; the embedded engine has its interface."""
    return release(str(read_release_data("containers")["last_engine_release"]["tensorrt_llm"]))


def target_release(version: str, *, embedded: bool) -> Release:
    """The release of an engine's target. For a release without engines, the embedded engine uses the last one with
    engines.

    Raises ForgeError for an unknown release, and without `embedded` for a release without engines.
    """
    return newest_release() if embedded and follows_engines(version) else release(version)


def tensors(role: ModelRole, direction: Direction, wanted: Release, dtypes: DtypeChoices) -> tuple[Tensor, ...]:
    """A model's inputs or outputs in a release; for preprocessing and postprocessing those of text, not of images."""
    entries = [entry for entry in _model(role)[direction] if _has(wanted, entry)]
    step = next((step for step in _model("ensemble")["steps"] if step["model_name"] == role), None)
    if role in ("preprocessing", "postprocessing") and step is not None:
        used = {pair["key"] for pair in step["input_map" if direction == "inputs" else "output_map"]}
        entries = [entry for entry in entries if entry["name"] in used]
    return tuple(_tensor(entry, wanted, dtypes) for entry in entries)


def parameters(role: ModelRole, wanted: Release) -> tuple[Parameter, ...]:
    """The possible parameters of a model's config.pbtxt in a release."""
    return tuple(
        Parameter(entry["key"], required=bool(entry["mandatory"]), literal=entry.get("literal"))
        for entry in _model(role)["parameters"]
        if _has(wanted, entry)
    )


def parameter_problem(key: str, wanted: Release) -> Problem | None:
    """Why a release's engine model does not read a parameter, or None. Its confidence is verified if that release's
    template was seen."""
    if any(parameter.key == key for parameter in parameters("tensorrt_llm", wanted)):
        return None
    entries = _model("tensorrt_llm")["parameters"]
    seen = {name for entry in entries for name in entry["evidence"].get("verified", ())}
    confidence: Confidence = "verified" if any(release(name).line == wanted.line for name in seen) else "inferred"
    where = f"TensorRT-LLM {wanted.version}: config.pbtxt"
    entry = next((entry for entry in entries if entry["key"] == key), None)
    if entry is None:
        return Problem(f"{where}: {key} is not known", "Leave it out.", confidence)
    if not wanted.within(None, entry["until"]):
        return Problem(f"{where}: {key} was removed after {entry['until']}", f"Target {entry['until']}.", confidence)
    return Problem(f"{where}: {key} was added in {entry['since']}", f"Target {entry['since']}.", confidence)


def text_flow(wanted: Release) -> TextFlow:
    """The mapping of names between the ensemble's steps in a release."""
    preprocessing, engine, _ = _model("ensemble")["steps"]
    inner = {value: key for key, value in _pairs(preprocessing["output_map"], wanted)}
    engine_inputs = _pairs(engine["input_map"], wanted)
    return TextFlow(
        text_to_preprocessing=tuple((value, key) for key, value in _pairs(preprocessing["input_map"], wanted)),
        preprocessing_to_engine=tuple((inner[value], key) for key, value in engine_inputs if value in inner),
        text_to_engine=tuple((value, key) for key, value in engine_inputs if value not in inner),
        engine_to_text=tuple(
            (key, value) for key, value in _pairs(engine["output_map"], wanted) if not value.startswith("_")
        ),
    )


def _model(role: ModelRole) -> Mapping[str, Any]:
    model: Mapping[str, Any] = read_release_data("triton-model-config")["models"][role]
    return model


def _has(wanted: Release, entry: Mapping[str, Any]) -> bool:
    return wanted.within(entry["since"], entry["until"])


def _pairs(step_map: list[Mapping[str, Any]], wanted: Release) -> list[tuple[str, str]]:
    return [(entry["key"], entry["value"]) for entry in step_map if _has(wanted, entry)]


def _tensor(entry: Mapping[str, Any], wanted: Release, dtypes: DtypeChoices) -> Tensor:
    declared = dict(entry)
    for change in entry.get("changed", ()):
        if wanted.within(change["since"], None):
            declared |= change
    return Tensor(
        name=declared["name"],
        dtype=dtypes.resolve(declared["dtype"]),
        dims=tuple(declared["dims"]),
        optional=bool(declared["optional"]),
        scalar=declared.get("reshape") == [],
        ragged=bool(declared.get("allow_ragged_batch")),
    )
