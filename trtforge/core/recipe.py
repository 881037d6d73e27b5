"""A recipe: every choice of one build, from the model to the quality gate. Defaults and help live here, once."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from trtforge.core.config_model import Config, holds_text, parse_value
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.features import FeaturesConfig
from trtforge.core.sizes import Bytes
from trtforge.core.yaml_text import read_yaml, read_yaml_text

_COMPARE = "Compare with `trtforge recipes show demo-int4awq`."
_GIVE = "Give a recipe file, or a name from `trtforge recipes list`."

QuantFormat = Literal["none", "fp8", "fp8_rowwise", "int4_awq", "w4a8_awq", "int8_sq", "int8_wo", "int4_wo", "nvfp4"]
KvCacheFormat = Literal["none", "fp8", "int8"]
DtypeChoice = Literal["auto", "float16", "bfloat16", "float32"]
Backend = Literal["auto", "tensorrt_llm", "torch", "llmapi"]
Device = Literal["auto", "cpu", "cuda"]
SchedulerPolicy = Literal["guaranteed_no_evict", "max_utilization"]


class ModelConfig(Config):
    """Which Hugging Face checkpoint."""

    source: str = Field(description="Hub id, or a directory relative to the recipe.")
    revision: str = Field("main", description="Branch, tag or commit on the hub.")
    dtype: DtypeChoice = Field("auto", description="auto keeps float16 and bfloat16; float32 becomes float16.")
    allow_nonfinite: bool = Field(
        False, description="Convert NaN and infinite weights with a warning; calibrate and verify refuse them."
    )


class CalibrationConfig(Config):
    """What activations are measured on."""

    data: str = Field(
        "builtin:stdlib",
        description="FILE.jsonl, .txt, .parquet or .safetensors, hf:ID[@REVISION][:CONFIG[:SPLIT]] or builtin:stdlib.",
    )
    samples: int = Field(128, ge=1, description="Number of samples.")
    sequence_length: int = Field(512, ge=2, description="Tokens of a sample.")
    batch_size: int = Field(8, ge=1, description="Samples per forward pass.")
    seed: int = Field(0, description="Order in which samples are drawn.")


class QuantizationConfig(Config):
    """Number formats of weights, activations and the KV cache."""

    format: QuantFormat = Field("none", description="Format of the decoder's linear layers.")
    kv_cache: KvCacheFormat = Field("none", description="Format of the KV cache; none is the model's dtype.")
    group_size: Literal[64, 128] = Field(128, description="INT4-AWQ: weights that share a scale, along the input.")
    exclude_modules: tuple[str, ...] = Field(
        (), description="Linear layers that stay as they are: Hugging Face names, * for anything."
    )
    awq_clip: bool = Field(False, description="AWQ: also search how far the blocks of a weight are best clipped.")
    memory: Bytes | None = Field(
        None, description="What calibration stays under, such as 16GB; hidden states go to disk."
    )
    calibration: CalibrationConfig = CalibrationConfig()


class ParallelConfig(Config):
    """How the model is split over GPUs."""

    tp: int = Field(1, ge=1, description="Tensor parallelism.")
    pp: int = Field(1, ge=1, description="Pipeline parallelism.")
    ep: int = Field(1, ge=1, description="Expert parallelism (mixture of experts).")


class TargetConfig(Config):
    """What the engine is built for."""

    gpu: str | None = Field(
        None,
        description="GPU such as h100-80gb: its formats and memory are judged, and a build on another SM is refused.",
    )
    tensorrt_llm: str = Field("1.2.1", description="TensorRT-LLM release that serves the engine.")


class EngineConfig(Config):
    """The engine and its limits. A limit left out follows from the others and the model."""

    backend: Backend = Field(
        "auto",
        description="auto: tensorrt_llm where it is installed and a GPU is there, else torch; llmapi needs no build.",
    )
    device: Device = Field("auto", description="torch backend: where it runs.")
    compute_dtype: DtypeChoice = Field("auto", description="torch backend: type that the arithmetic is done in.")
    target: TargetConfig = TargetConfig()
    max_batch_size: int = Field(64, ge=1, description="Requests that are in flight at once.")
    max_input_len: int | None = Field(None, ge=1, description="Longest prompt in tokens.")
    max_seq_len: int | None = Field(None, ge=2, description="Longest prompt plus output in tokens.")
    max_num_tokens: int | None = Field(None, ge=1, description="Tokens in one step, over all requests.")
    max_beam_width: int = Field(1, ge=1, description="Beams of a request.")
    tokens_per_block: int | None = Field(None, ge=1, description="Tokens in one KV cache block.")
    features: FeaturesConfig = FeaturesConfig()

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError("tokens_per_block must be a power of two")
        return value


class ServingConfig(Config):
    """How Triton serves the engine."""

    streaming: bool = Field(True, description="Decoupled responses: tokens arrive as they are made.")
    scheduler: SchedulerPolicy = Field("guaranteed_no_evict", description="When a waiting request may start.")
    kv_cache_fraction: float = Field(0.9, gt=0, le=1, description="Share of the free memory that the KV cache takes.")
    kv_cache_tokens: int | None = Field(None, ge=1, description="Upper bound of tokens in the KV cache.")
    max_queue_size: int = Field(
        2048, ge=0, description="Requests that may wait; beyond, new ones are refused at once. 0 is 2048."
    )
    max_queue_seconds: float | None = Field(
        None, gt=0, description="Longest time that a request may wait before it is refused; null is no limit."
    )
    exclude_input_in_output: bool = Field(True, description="Return the answer without the prompt.")


class GateConfig(Config):
    """The quality that a build must reach; a figure left out is not checked."""

    perplexity_increase: float | None = Field(None, ge=0, description="Largest relative increase (0.02 is 2 %).")
    top1_agreement: float | None = Field(None, ge=0, le=1, description="Smallest share of equal most likely tokens.")
    kl_mean: float | None = Field(None, ge=0, description="Largest mean KL divergence from the reference, in nats.")
    data: str = Field("builtin:stdlib", description="As calibration.data.")
    samples: int = Field(32, ge=1, description="Number of samples.")
    sequence_length: int = Field(256, ge=2, description="Tokens of a sample.")


class Recipe(Config):
    """One build. Only `name` and `model.source` are required."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, description="Names the build's output directory."
    )
    model: ModelConfig
    quantization: QuantizationConfig = QuantizationConfig()
    parallel: ParallelConfig = ParallelConfig()
    engine: EngineConfig = EngineConfig()
    serving: ServingConfig = ServingConfig()
    gate: GateConfig = GateConfig()


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file and apply `dotted.key=value` overrides (values as YAML). Paths become absolute.

    Raises ForgeError naming the file and the dotted key.
    """
    values = _read(path)
    for override in overrides:
        _set(values, override)
    recipe = Recipe.parse(values, str(path))
    return _with_paths_from(recipe, path.parent)


def paths_in(path: Path) -> dict[str, str]:
    """The relative paths that a recipe file names, each with its absolute form."""
    written = Recipe.parse(_read(path), str(path))
    resolved = _with_paths_from(written, path.parent)
    pairs = zip(_sources(written), _sources(resolved), strict=True)
    return {relative: absolute for relative, absolute in pairs if relative != absolute}


def recipe_text(path: Path) -> str:
    """A recipe file as it stands. Raises ForgeError if it cannot be read."""
    return read_yaml_text(path, hint=_COMPARE, absent=_GIVE)


def _sources(recipe: Recipe) -> tuple[str, ...]:
    features = recipe.engine.features
    adapters = features.lora.adapters if features.lora is not None else ()
    draft = (features.draft.model,) if features.draft is not None and features.draft.model is not None else ()
    return recipe.model.source, recipe.quantization.calibration.data, recipe.gate.data, *adapters, *draft


def _read(path: Path) -> dict[str, Any]:
    values = read_yaml(path, hint=_COMPARE, absent=_GIVE)
    if not isinstance(values, dict):
        raise ForgeError(f"{path}: not a recipe: it holds no keys", hint=_COMPARE)
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
    is_text = value is None or isinstance(value, str | list | dict)
    values[last] = value if is_text or not holds_text(Recipe, key) else text


def gate_from(gate: GateConfig, base: Path) -> GateConfig:
    """A gate that a file in `base` states: a relative path of data is taken from there."""
    return gate.model_copy(update={"data": _resolve(gate.data, base)})


def _with_paths_from(recipe: Recipe, base: Path) -> Recipe:
    """The recipe with its relative paths taken from the recipe's own directory."""
    calibration = recipe.quantization.calibration
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"source": _resolve(recipe.model.source, base)}),
            "quantization": recipe.quantization.model_copy(
                update={"calibration": calibration.model_copy(update={"data": _resolve(calibration.data, base)})}
            ),
            "gate": gate_from(recipe.gate, base),
            "engine": recipe.engine.model_copy(update={"features": _features_from(recipe.engine.features, base)}),
        }
    )


def _features_from(features: FeaturesConfig, base: Path) -> FeaturesConfig:
    lora, draft = features.lora, features.draft
    if lora is not None and lora.adapters:
        adapters = tuple(_resolve(adapter, base) for adapter in lora.adapters)
        features = features.model_copy(update={"lora": lora.model_copy(update={"adapters": adapters})})
    if draft is not None and draft.model is not None:
        model = _resolve(draft.model, base)
        features = features.model_copy(update={"draft": draft.model_copy(update={"model": model})})
    return features


def _resolve(source: str, base: Path) -> str:
    """`source` as an absolute path if that exists; hub ids, `builtin:` and `hf:` names stay as they are."""
    path = base / source
    return str(path.resolve()) if path.exists() else source
