"""A recipe: all settings of one build, from the model to the quality gate, with their defaults and descriptions."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from trtforge.core import defaults
from trtforge.core.config_model import Config, GivenBy, LineOf, Location, holds_none, holds_text, parse_value
from trtforge.core.config_schema import also, narrowed
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.features import FeaturesConfig
from trtforge.core.plausible import LARGEST
from trtforge.core.recipe_paths import changed, path_in_file, path_of_option
from trtforge.core.recipe_text import LONGEST_NAME
from trtforge.core.serving import SchedulerPolicy as SchedulerPolicy
from trtforge.core.serving import ServingConfig
from trtforge.core.sizes import Bits, Bytes
from trtforge.core.yaml_text import Lines, parse_yaml, read_yaml_text

_COMPARE = "Compare with `trtforge recipes show demo-int4awq`."
_GIVE = "Give a recipe file, or a name from `trtforge recipes list`."

QuantFormat = Literal["none", "fp8", "fp8_rowwise", "int4_awq", "w4a8_awq", "int8_sq", "int8_wo", "int4_wo", "nvfp4"]
CalibratedFormat = Literal["none", "fp8", "int4_awq", "w4a8_awq", "int8_sq", "int4_wo", "nvfp4"]
KvCacheFormat = Literal["none", "fp8", "int8"]
DtypeChoice = Literal["auto", "float16", "bfloat16", "float32"]
Backend = Literal["auto", "tensorrt_llm", "torch", "llmapi"]
ResolvedBackend = Literal["tensorrt_llm", "torch", "llmapi"]
"""A backend after `auto` is resolved."""
EngineBackend = Literal["tensorrt_llm", "torch"]
"""A backend that `auto` can resolve to."""
Device = Literal["auto", "cpu", "cuda"]
GroupSize = Literal[64, 128]
RoundingMethod = Literal["nearest", "compensated"]
RoundingChoice = Literal["auto", "nearest", "compensated"]
KvScaling = Literal["largest", "searched"]
KvScalingChoice = Literal["auto", "largest", "searched"]


class ModelConfig(Config):
    """The Hugging Face checkpoint."""

    source: str = Field(min_length=1, description="Hub id, or a directory relative to the recipe.")
    revision: str = Field("main", description="Branch, tag or commit on the hub.")
    dtype: DtypeChoice = Field("auto", description="auto keeps float16 and bfloat16; float32 becomes float16.")
    allow_nonfinite: bool = Field(
        False, description="Convert NaN and infinite weights with a warning; calibrate and verify refuse them."
    )


class CalibrationConfig(Config):
    """Calibration samples."""

    data: str = Field(
        defaults.CALIBRATION_DATA,
        description="FILE.jsonl, .txt, .parquet or .safetensors, hf:ID[@REVISION][:CONFIG[:SPLIT]] or builtin:stdlib.",
    )
    samples: int = Field(defaults.CALIBRATION_SAMPLES, ge=1, description="Number of samples.")
    sequence_length: int = Field(defaults.CALIBRATION_TOKENS, ge=2, description="Tokens per sample.")
    batch_size: int = Field(defaults.CALIBRATION_BATCH_SIZE, ge=1, description="Samples per forward pass.")
    seed: int = Field(0, description="Random seed for drawing samples.")

    @property
    def named(self) -> bool:
        """Whether the data was set, not left to the default."""
        return "data" in self.model_fields_set


class QuantizationConfig(Config):
    """Number formats of weights, activations and the KV cache."""

    format: QuantFormat = Field("none", description="Format of the decoder's linear layers.")
    kv_cache: KvCacheFormat = Field("none", description="Format of the KV cache; none is the model's dtype.")
    kv_scales: KvScalingChoice = Field(
        "auto",
        description="Scales of the KV cache: largest (from the largest magnitude, as in ModelOpt), searched (smallest "
        "error of attention), or auto: searched for int8, largest for fp8.",
    )
    group_size: GroupSize = Field(
        defaults.GROUP_SIZE, description="AWQ group size: weights along the input that share a scaling factor."
    )
    exclude_modules: tuple[str, ...] = Field(
        (), description="Linear layers to leave unquantised: Hugging Face names; * matches anything."
    )
    budget: Bits | None = Field(
        None,
        description="int4_awq in mixed precision: maximum mean bits per weight, such as 4.5bits. The layers that "
        "would lose most accuracy get fp8 or stay unquantised.",
    )
    awq_clip: bool = Field(False, description="AWQ: also search the clipping range of each group.")
    rounding: RoundingChoice = Field(
        "auto",
        description="Rounding of 4-bit weights: nearest (as in ModelOpt), compensated (later columns correct errors), "
        "or auto: compensated; for int4_wo only if calibration.data is given.",
    )
    memory: Bytes | None = Field(
        None, description="Memory limit of calibration, such as 16GB; hidden states are kept on disk."
    )
    calibration: CalibrationConfig = CalibrationConfig()


class ParallelConfig(Config):
    """How the model is split over GPUs."""

    tp: int = Field(1, ge=1, description="Tensor parallelism.")
    pp: int = Field(1, ge=1, description="Pipeline parallelism.")
    ep: int = Field(1, ge=1, description="Expert parallelism (mixture of experts).")


class TargetConfig(Config):
    """The target of the engine."""

    gpu: str | None = Field(
        None,
        description="Target GPU, such as h100-80gb: formats and memory are checked; a build on another SM is refused.",
    )
    tensorrt_llm: str = Field(defaults.TENSORRT_LLM, description="TensorRT-LLM release that serves the engine.")


_POWERS_OF_TWO = [1 << power for power in range(LARGEST["tokens_per_block"].bit_length())]


class EngineConfig(Config):
    """The engine and its limits. An unset limit is derived from the others and the model."""

    backend: Backend = Field(
        "auto",
        description="auto: tensorrt_llm if it is installed and a GPU is available, else torch; llmapi needs no build.",
    )
    device: Device = Field("auto", description="torch backend: device.")
    compute_dtype: DtypeChoice = Field("auto", description="torch backend: dtype of the computations.")
    int8_activations: bool = Field(
        False,
        description="torch backend on the CPU: INT4 layers round activations to 8 bits, by a scale of each group: "
        "some 1.5 times as fast for prompts and many requests, slightly less exact.",
    )
    target: TargetConfig = TargetConfig()
    max_batch_size: int = Field(defaults.MAX_BATCH_SIZE, ge=1, description="Maximum number of requests in flight.")
    max_input_len: int | None = Field(None, ge=1, description="Maximum prompt length in tokens.")
    max_seq_len: int | None = Field(None, ge=2, description="Maximum length of prompt plus output in tokens.")
    max_num_tokens: int | None = Field(None, ge=1, description="Maximum tokens per iteration, over all requests.")
    max_beam_width: int = Field(1, ge=1, description="Maximum beam width.")
    tokens_per_block: int | None = Field(
        None, ge=1, description="Tokens per KV block.", json_schema_extra=narrowed(enum=_POWERS_OF_TWO)
    )
    features: FeaturesConfig = FeaturesConfig()

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError("tokens_per_block must be a power of two")
        return value


_Limit = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
_OR_NONE = also({"const": "none"})
LIMITS = ("perplexity_increase", "top1_agreement", "kl_mean", "kl_p99")
"""The keys of a gate that are limits; the others choose the samples."""


class GateConfig(Config):
    """The quality that a build must reach; unset limits are not checked."""

    perplexity_increase: _Limit = Field(
        None, description="Maximum relative increase (0.02 is 2 %).", json_schema_extra=_OR_NONE
    )
    top1_agreement: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Minimum share of positions with the same most probable token.",
        json_schema_extra=_OR_NONE,
    )
    kl_mean: _Limit = Field(
        None, description="Maximum mean KL divergence from the reference, in nats.", json_schema_extra=_OR_NONE
    )
    kl_p99: _Limit = Field(
        None,
        description="Maximum 99th percentile of the KL divergence over the tokens, in nats.",
        json_schema_extra=_OR_NONE,
    )
    data: str = Field(defaults.CALIBRATION_DATA, description="See quantization.calibration.data.")
    samples: int = Field(defaults.GATE_SAMPLES, ge=1, description="Number of samples.")
    sequence_length: int = Field(defaults.GATE_TOKENS, ge=2, description="Tokens per sample.")

    @field_validator(*LIMITS, mode="before")
    @classmethod
    def _not_checked(cls, value: object) -> object:
        return None if value == "none" else value

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: limit for name in LIMITS if (limit := getattr(self, name)) is not None}


class Recipe(Config):
    """One build. Only `name` and `model.source` are required."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=LONGEST_NAME,
        description="Names the build's output directory: letters, digits, `.`, `_` and `-`, not first one of these.",
    )
    model: ModelConfig
    quantization: QuantizationConfig = QuantizationConfig()
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    gate: GateConfig = GateConfig()


_NO_OPTIONS: Mapping[str, str] = {}


def load_recipe(path: Path, overrides: tuple[str, ...] = (), options: Mapping[str, str] = _NO_OPTIONS) -> Recipe:
    """Read a recipe file and apply `dotted.key=value` overrides (values as YAML). Paths in the file become absolute.

    `options`: command-line options equivalent to some of the overrides, by override. Raises ForgeError naming the file
    and the dotted key, or the option.
    """
    text = recipe_text(path)

    @cache
    def lines() -> Lines:
        return Lines(text)

    def line(location: Location) -> int | None:
        return lines().line_of(location)

    return recipe_of(_values_in(text, path), str(path.resolve()), path.parent, overrides, line, options)


def recipe_of(
    values: dict[str, Any],
    where: str,
    base: Path,
    overrides: tuple[str, ...] = (),
    line: LineOf | None = None,
    options: Mapping[str, str] = _NO_OPTIONS,
) -> Recipe:
    """The recipe of these values, with overrides; paths are relative to `base`. Raises ForgeError naming `where`.

    `line`: the line of a value in the file `where`. `options`: see `load_recipe`.
    """
    given = _given_by(overrides, deepcopy(values), options)
    override(values, overrides)
    return _with_paths_from(Recipe.parse(values, where, line=line, given=given), base, given)


def _given_by(overrides: tuple[str, ...], before: dict[str, Any], options: Mapping[str, str]) -> GivenBy:
    """Which option gave a value. `before`: the values without the overrides."""
    keys = {override: tuple(override.partition("=")[0].split(".")) for override in overrides}

    def given(location: Location) -> str | None:
        path = tuple(map(str, location))
        for override in reversed(overrides):
            key = keys[override]
            if path[: len(key)] == key or (key[: len(path)] == path and not _holds(before, path)):
                return options.get(override, f"--set {override}")
        return None

    return given


def _holds(values: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def override(values: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """Change a recipe's values by `dotted.key=value` overrides, in place. Raises UsageError, ForgeError."""
    for each in overrides:
        _set(values, each)


def recipe_in(text: str, where: object) -> Recipe:
    """The recipe of a text, with paths as they are written. Raises ForgeError naming `where`."""
    return Recipe.parse(_values_in(text, where), str(where))


def paths_in(path: Path) -> dict[Location, str]:
    """The absolute paths in place of the relative ones in a recipe file, by their keys and indexes."""
    written = recipe_in(recipe_text(path), path)
    before, resolved = _sources(written), _sources(_with_paths_from(written, path.parent))
    return {location: source for location, source in resolved.items() if source != before[location]}


def recipe_text(path: Path) -> str:
    """The text of a recipe file. Raises ForgeError if it cannot be read."""
    return read_yaml_text(path, hint=_COMPARE, absent=_GIVE)


def _sources(recipe: Recipe) -> dict[Location, str]:
    """The values that may be paths relative to the recipe, by their keys and indexes."""
    features = recipe.engine.features
    adapters = features.lora.adapters if features.lora is not None else ()
    drafting = {"draft": features.draft, "medusa": features.medusa, "eagle": features.eagle, "eagle3": features.eagle3}
    at = ("engine", "features")
    found: dict[Location, str | None] = {
        ("model", "source"): recipe.model.source,
        ("quantization", "calibration", "data"): recipe.quantization.calibration.data,
        ("gate", "data"): recipe.gate.data,
        ("serving", "draft_engine"): recipe.serving.draft_engine,
        (*at, "draft", "engine"): features.draft.engine if features.draft is not None else None,
    }
    found |= {(*at, "lora", "adapters", number): adapter for number, adapter in enumerate(adapters)}
    found |= {(*at, name, "model"): each.model for name, each in drafting.items() if each is not None}
    return {location: source for location, source in found.items() if source is not None}


def _values_in(text: str, where: object) -> dict[str, Any]:
    values = parse_yaml(text, where, _COMPARE)
    if not isinstance(values, dict):
        found = "it holds nothing" if values is None else "not keys with values"
        raise ForgeError(f"{where}: not a recipe: {found}", hint=_COMPARE)
    return values


def _set(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {override}: not KEY=VALUE", hint="For example --set engine.max_batch_size=16.")
    *parents, last = key.split(".")
    for parent in parents:
        nested = values.setdefault(parent, {})
        if not isinstance(nested, dict):
            raise ForgeError(f"--set {override}: {parent} has no keys below it", hint="Check the dotted key.")
        values = nested
    value = parse_value(text, f"--set {key}")
    if value == "none" and holds_none(Recipe, key):
        value = None
    is_text = value is None or isinstance(value, str | list | dict)
    values[last] = value if is_text or not holds_text(Recipe, key) else text


def gate_from(gate: GateConfig, base: Path) -> GateConfig:
    """A gate from a file in `base`; a relative data path is relative to `base`."""
    return gate.model_copy(update={"data": path_in_file(("gate", "data"), gate.data, base)})


def _with_paths_from(recipe: Recipe, base: Path, given: GivenBy | None = None) -> Recipe:
    """The recipe with relative paths resolved from `base`, the recipe's directory.

    `given`: the option that gave a value, whose path may also start at the current directory.
    """
    changes = {}
    for location, source in _sources(recipe).items():
        from_option = given is not None and given(location) is not None
        path = path_of_option(source, base) if from_option else path_in_file(location, source, base)
        if path != source:
            changes[location] = path
    resolved: Recipe = changed(recipe, changes)
    return resolved
