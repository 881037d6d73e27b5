"""A request for a plan: the choices of a user, and changes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, Literal

from trtforge.core.config_model import parse_value
from trtforge.core.dtypes import ModelDtype, model_dtype
from trtforge.core.errors import Repair, UsageError
from trtforge.core.features import FeaturesConfig
from trtforge.core.nearest import nearest_format
from trtforge.core.recipe import CalibrationConfig, EngineConfig, GateConfig, Recipe, ResolvedBackend, RoundingChoice
from trtforge.core.serving import ServingConfig
from trtforge.formats.adapter import require_layers_of, resolved_lora
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_config import layout_of_checkpoint
from trtforge.models.exclusions import modules_excluded_by
from trtforge.models.formats import FORMATS, MIXED_FORMATS
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.gpus import Gpu, gpu_named
from trtforge.plan.model import Model, find_model
from trtforge.plan.roofline import Workload

Option = Literal[
    "--tp", "--pp", "--ep", "--quant", "--kv-cache", "--group-size", "--dtype", "--gpu", "--target-version",
    "--max-seq-len", "--max-num-tokens", "--concurrency", "--set",
]  # fmt: skip
"""Options of the command line that can be changed; `--set`: a recipe key without its own option here."""

_SETTINGS: dict[Option, str] = {
    "--tp": "parallel.tp",
    "--pp": "parallel.pp",
    "--ep": "parallel.ep",
    "--quant": "quantization.format",
    "--kv-cache": "quantization.kv_cache",
    "--group-size": "quantization.group_size",
    "--dtype": "model.dtype",
    "--gpu": "engine.target.gpu",
    "--target-version": "engine.target.tensorrt_llm",
    "--max-seq-len": "engine.max_seq_len",
    "--max-num-tokens": "engine.max_num_tokens",
    "--concurrency": "engine.max_batch_size",
}

FIXED: frozenset[Option] = frozenset({"--tp", "--pp", "--ep", "--quant", "--kv-cache", "--group-size", "--dtype"})
"""The options that a TensorRT-LLM checkpoint fixes."""

TYPICAL_PROMPT, TYPICAL_OUTPUT = 1024, 256
"""Tokens of a typical request, unless given."""


@dataclass(frozen=True)
class Change:
    """Another value for one choice."""

    option: Option
    value: str

    def __str__(self) -> str:
        return f"{self.option} {quote(self.value)}"

    @property
    def setting(self) -> str:
        """The recipe's key with its value, as `--set` takes it."""
        return self.value if self.option == "--set" else f"{_SETTINGS[self.option]}={self.value}"

    @property
    def key(self) -> str:
        """The recipe's key."""
        return self.setting.partition("=")[0]


@dataclass(frozen=True)
class Request:
    """One requested deployment.

    `concurrency`: requests to run concurrently, which sets max_batch_size; None if not given. `calibration_memory`:
    bytes that calibration may use, None for no limit. `exclude_modules`: patterns of linear layers that stay
    unquantised. `budget`: mean bits of a weight in mixed precision. `draft`: the draft model, if
    engine.features.draft names one.
    """

    tp: int
    pp: int
    ep: int
    quant: str
    kv_cache: str
    group_size: int
    dtype: ModelDtype
    engine: EngineConfig
    serving: ServingConfig
    calibration: CalibrationConfig
    gate: GateConfig
    typical: Workload
    concurrency: int | None = None
    draft: Model | None = None
    calibration_memory: int | None = None
    exclude_modules: tuple[str, ...] = ()
    rounding: RoundingChoice = "auto"
    budget: float | None = None

    @property
    def bits(self) -> float | None:
        """Mean bits of a weight if its format is chosen within a budget; None if it is known."""
        return self.budget if self.quant == MIXED_FORMATS[0] else None

    @property
    def compensated(self) -> bool:
        """Whether calibration rounds with compensation."""
        methods = FORMATS[WEIGHTS[self.quant].name].methods
        default = "compensated" if self.calibration.named else methods[0]
        return "compensated" in methods and (default if self.rounding == "auto" else self.rounding) == "compensated"

    @property
    def gpu(self) -> Gpu | None:
        """The target GPU. Raises ForgeError for an unknown name."""
        name = self.engine.target.gpu
        return None if name is None else gpu_named(name)

    @property
    def for_tensorrt(self) -> bool | None:
        """Whether TensorRT-LLM's rules for engines apply; None if the backend is not chosen yet."""
        backend = self.resolved_backend
        return None if backend is None else backend == "tensorrt_llm"

    @property
    def resolved_backend(self) -> ResolvedBackend | None:
        """The backend; `auto` is TensorRT-LLM's engine builder if a GPU or a release is given, else not chosen yet."""
        backend, target = self.engine.backend, self.engine.target
        if backend != "auto":
            return backend
        return "tensorrt_llm" if target.gpu is not None or "tensorrt_llm" in target.model_fields_set else None

    def with_features(self, features: FeaturesConfig) -> "Request":
        """This request with other features of the engine."""
        return self._with_engine(features=features)

    def changed(self, *changes: Change) -> "Request":
        """This request with other choices."""
        request = self
        for change in changes:
            request = request._with(change)
        return request

    def _with(self, change: Change) -> "Request":
        value = change.value
        match change.option:
            case "--tp":
                return replace(self, tp=int(value))
            case "--pp":
                return replace(self, pp=int(value))
            case "--ep":
                return replace(self, ep=int(value))
            case "--group-size":
                return replace(self, group_size=int(value))
            case "--concurrency":
                return replace(self, concurrency=int(value))._with_engine(max_batch_size=int(value))
            case "--quant":
                return replace(self, quant=value)
            case "--kv-cache":
                return replace(self, kv_cache=value)
            case "--dtype":
                return replace(self, dtype=model_dtype(value, value))
            case "--gpu":
                return self._with_target(gpu=value)
            case "--target-version":
                return self._with_target(tensorrt_llm=value)
            case "--max-seq-len":
                return self._with_engine(max_seq_len=int(value))
            case "--max-num-tokens":
                return self._with_engine(max_num_tokens=int(value))
            case "--set":
                return self._with_setting(change.key, parse_value(value.partition("=")[2], change.key))

    def _with_setting(self, key: str, value: Any) -> "Request":
        if key == "quantization.memory":
            return replace(self, calibration_memory=value)
        section, *path = key.split(".")
        assert section == "engine", key
        values: dict[str, Any] = self.engine.model_dump(exclude_unset=True)
        part = values
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = value
        return replace(self, engine=EngineConfig.model_validate(values))

    def _with_engine(self, **values: object) -> "Request":
        return replace(self, engine=self.engine.model_copy(update=values))

    def _with_target(self, **values: object) -> "Request":
        return self._with_engine(target=self.engine.target.model_copy(update=values))


def request_of(recipe: Recipe, model: Model, options: Mapping[Option, Any], typical: Workload | None = None) -> Request:
    """The request of a recipe; `options` of the command line override the recipe (None: not given).

    Raises UsageError for an unknown format, ForgeError for adapters or a draft model that cannot be read, and as
    `require_layers_of` does.
    """
    quant, features = recipe.quantization, recipe.engine.features
    if features.lora is not None:
        lora = resolved_lora(features.lora).model_copy(update={"adapters": features.lora.adapters})
        features = features.model_copy(update={"lora": lora})
    draft = features.draft.model if features.draft is not None else None
    request = Request(
        tp=recipe.parallel.tp,
        pp=recipe.parallel.pp,
        ep=recipe.parallel.ep,
        quant=quant.format,
        kv_cache=quant.kv_cache,
        group_size=quant.group_size,
        dtype=model_dtype(str(options.get("--dtype") or recipe.model.dtype), model.config.dtype),
        engine=recipe.engine.model_copy(update={"features": features}),
        serving=recipe.serving,
        calibration=quant.calibration,
        gate=recipe.gate,
        typical=typical or Workload(TYPICAL_PROMPT, TYPICAL_OUTPUT),
        draft=None if draft is None else find_model(draft),
        calibration_memory=quant.memory,
        exclude_modules=quant.exclude_modules,
        rounding=quant.rounding,
        budget=quant.budget,
    )
    given = [Change(name, str(value)) for name, value in options.items() if value is not None and name != "--dtype"]
    request = request.changed(*given)
    if request.gpu is not None:
        request = request.changed(Change("--gpu", request.gpu.name))  # replaces an alias
    if recipe.engine.features.lora is not None and (backend := request.resolved_backend) is not None:
        require_layers_of(recipe.engine.features.lora, backend)
    for option, name, known in (("--quant", request.quant, WEIGHTS), ("--kv-cache", request.kv_cache, CACHES)):
        if name not in known:
            nearest = nearest_format(name, known)
            meant = f"Did you mean {nearest}? " if nearest else ""
            error = UsageError(f"{option}: {name} is not a format", hint=f"{meant}Formats: {', '.join(known)}.")
            raise error.repaired_by(Repair(name, nearest) if nearest else None)
    if model.checkpoint is not None:
        return _as_made(request, model, model.checkpoint, options)
    return _as_stored(request, model)


def _as_made(request: Request, model: Model, checkpoint: CheckpointConfig, options: Mapping[Option, Any]) -> Request:
    """The request with the layout and the formats of a checkpoint. Raises UsageError for options that differ."""
    parallel, quantization = checkpoint.parallel, checkpoint.quantization
    layout = layout_of_checkpoint(checkpoint)
    if layout is None:
        algorithm = f"{quantization.quant_algo}, KV cache {quantization.kv_cache_quant_algo}"
        raise UsageError(
            f"{model.name}: its quantisation is not among the formats that trtforge plans: {algorithm}",
            hint=f"`trtforge compile {quote(model.name)} ENGINE --dry-run` shows its engine.",
        )
    made: dict[Option, object] = {
        "--tp": parallel.tp,
        "--pp": parallel.pp,
        "--ep": parallel.ep,
        "--quant": layout.quant,
        "--kv-cache": layout.kv_cache,
        "--group-size": layout.group_size,
        "--dtype": checkpoint.dtype,
    }
    for option, value in made.items():
        asked = options.get(option)
        if asked is not None and str(asked) != str(value):
            raise UsageError(
                f"{option} {asked}: {model.name} is a checkpoint, made with {option} {value}",
                hint=f"Leave {option} out, or plan the Hugging Face model that it was made from.",
            )
    changes = [Change(option, str(value)) for option, value in made.items()]
    excluded = modules_excluded_by(checkpoint, model.family, model.facts)
    return replace(request.changed(*changes), exclude_modules=excluded, budget=None)


def _as_stored(request: Request, model: Model) -> Request:
    """A model that is already quantised keeps its formats, unless others are requested."""
    stored = model.stored
    if stored is None:
        return request
    if stored.fp8_kv_cache and request.kv_cache == "none":
        request = replace(request, kv_cache="fp8")
    if request.quant not in ("none", stored.format):
        return request
    return replace(request, quant=stored.format, group_size=stored.group_size)
