"""TensorRT-LLM's config.json, of a checkpoint and of an engine, with the keys that 0.17 to 1.2 all accept.

Sources: `PretrainedConfig`, `QuantConfig` in tensorrt_llm/models/modeling_utils.py; `EngineConfig` in builder.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from trtforge.core.dtypes import ModelDtype
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.manifest import read_manifest, use_of
from trtforge.core.nearest import no_directory
from trtforge.core.parallel import Parallel
from trtforge.core.plausible import require_plausible
from trtforge.formats.checkpoint_values import require_values

CONFIG_FILE = "config.json"
LAYERS_FILE = "quant_cfg.json"
"""The formats of the linear layers of a checkpoint whose `quant_algo` is MIXED_PRECISION."""
MIXED_PRECISION = "MIXED_PRECISION"
UNQUANTIZED_MODULES = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate",
)
"""TensorRT-LLM's defaults (quantization/quantize.py); a list in config.json replaces them, so it must repeat them."""


_ATTN_BIAS, _BIAS = MappingProxyType({"attn_bias": True}), MappingProxyType({"bias": True})
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "QWenForCausalLM": _ATTN_BIAS,
    "Qwen2ForCausalLM": _ATTN_BIAS,
    "Qwen2MoeForCausalLM": _ATTN_BIAS,
    "Qwen3ForCausalLM": _ATTN_BIAS,
    "Qwen3MoeForCausalLM": _ATTN_BIAS,
    "GPT2LMHeadModel": _BIAS,
    "GPTBigCodeForCausalLM": _BIAS,
    "Starcoder2ForCausalLM": _BIAS,
    "NemotronForCausalLM": _BIAS,
    "CohereForCausalLM": MappingProxyType({"output_multiplier_scale": 0.0625}),
    "FalconForCausalLM": MappingProxyType({"parallel_attention": False}),
}
"""TensorRT-LLM's defaults of absent fields, by architecture, if they differ from `CheckpointConfig`'s; other converters
leave these fields out. Source: the config classes in tensorrt_llm/models/{qwen,gpt,commandr,falcon}."""

MEDUSA_ARCHITECTURE, EAGLE_ARCHITECTURE = "MedusaForCausalLM", "EagleForCausalLM"


def base_architecture(architecture: str, model_type: object) -> str:
    """The architecture of the model in a checkpoint, which differs from the checkpoint's if it also contains draft
    heads.

    Source: `MedusaForCausalLm` in tensorrt_llm/models/medusa/model.py and `EagleForCausalLM` in eagle/model.py (1.2),
    which support no other bases.
    """
    if architecture == MEDUSA_ARCHITECTURE:
        return "Qwen2ForCausalLM" if "qwen" in str(model_type or "").lower() else "LlamaForCausalLM"
    return "LlamaForCausalLM" if architecture == EAGLE_ARCHITECTURE else architecture


class _Foreign(BaseModel):
    """A part of TensorRT-LLM's file: keys that we read are typed, unknown keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")


class LayerQuantization(_Foreign):
    """The format of one linear layer, in `quantized_layers`."""

    quant_algo: str
    group_size: int = Field(128, ge=1)
    has_zero_point: bool = False
    pre_quant_scale: bool = False


class Quantization(_Foreign):
    """The `quantization` object.

    `quantized_layers`: of MIXED_PRECISION, by TensorRT-LLM's names of the linear layers; the others are not quantised.
    A checkpoint has it in quant_cfg.json, an engine in config.json (`LayerQuantConfig` in models/modeling_utils.py).
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = Field(128, ge=1)
    smoothquant_val: float | None = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None
    quantized_layers: dict[str, LayerQuantization] | None = None

    @model_serializer(mode="wrap")
    def _without_layers(self, serialized: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `quantized_layers` if unset, as no release accepts null."""
        values: dict[str, Any] = serialized(self)
        return {key: value for key, value in values.items() if key != "quantized_layers" or value is not None}


class CheckpointConfig(_Foreign):
    """config.json of a checkpoint, `pretrained_config` of an engine."""

    architecture: str
    dtype: ModelDtype
    logits_dtype: str = "float32"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=0)
    hidden_act: str
    norm_epsilon: float = 1e-5
    position_embedding_type: str = "rope_gpt_neox"
    max_position_embeddings: int | None = Field(None, ge=1)
    rotary_base: float = 10000.0
    rotary_scaling: dict[str, Any] | None = None
    rotary_embedding_dim: int | None = Field(None, ge=0)
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False
    attn_bias: bool = False
    mlp_bias: bool = False
    mapping: dict[str, Any] = Field(default_factory=dict)
    """In an engine it also has objects (`cp_config`) and lists (`to_dict` in tensorrt_llm/mapping.py)."""
    quantization: Quantization = Quantization()

    @property
    def parallel(self) -> Parallel:
        """How the rank files are split."""
        return Parallel.of_mapping(self.mapping)

    @property
    def base_architecture(self) -> str:
        """The architecture of the model itself, without draft heads."""
        return base_architecture(self.architecture, (self.model_extra or {}).get("model_type"))

    @property
    def experts(self) -> int:
        """The number of experts, 0 for a dense model (some families have `moe` with num_experts 0)."""
        moe = (self.model_extra or {}).get("moe")
        found = moe.get("num_experts") if isinstance(moe, dict) else None
        return found if isinstance(found, int) else 0

    def to_json(self) -> str:
        """The exact text of a checkpoint's config.json."""
        values = self.model_dump(mode="json")
        values["quantization"].pop("quantized_layers", None)
        return json.dumps(values, indent=2) + "\n"

    def layers_json(self) -> str | None:
        """The exact text of quant_cfg.json; None if all layers have one format."""
        quantization = self.quantization
        if quantization.quantized_layers is None:
            return None
        values = {
            "quant_algo": quantization.quant_algo,
            "kv_cache_quant_algo": quantization.kv_cache_quant_algo,
            "quantized_layers": {
                name: layer.model_dump(mode="json") for name, layer in quantization.quantized_layers.items()
            },
        }
        return json.dumps(values, indent=2) + "\n"


DRAFT_ENGINE = "draft_engine"
"""Directory of the draft model's engine, inside an engine of the embedded runtime."""


CARRIED_FILE = "carried.safetensors"
"""File with the source's tensors that only an LLM API model uses, under their Hugging Face names."""


def rank_file(index: int | str) -> str:
    """File name of a rank's weights in a checkpoint (and in a torch engine)."""
    return f"rank{index}.safetensors"


def read_checkpoint_config(directory: Path) -> CheckpointConfig:
    """The config.json of a TensorRT-LLM checkpoint. Raises ForgeError for other directories."""
    values = _read(directory)
    if "pretrained_config" in values:
        raise ForgeError(f"{directory} is an engine, not a checkpoint", hint="Give the directory that convert wrote.")
    if "architectures" in values and "architecture" not in values:
        raise ForgeError(
            f"{directory} is a Hugging Face checkpoint (or an llmapi engine, which is one)",
            hint=f"Run `trtforge convert {quote(str(directory))} CHECKPOINT` and give its result.",
        )
    if "architecture" not in values:
        raise ForgeError(
            f"{directory} is not a TensorRT-LLM checkpoint", hint="Run `trtforge convert HF_DIR OUT` first."
        )
    quantization = values.get("quantization")
    if isinstance(quantization, dict) and quantization.get("quant_algo") == MIXED_PRECISION:
        found = read_json_object(directory / LAYERS_FILE, hint="Convert the model again.")
        values["quantization"] = {**quantization, "quantized_layers": found.get("quantized_layers")}
    return _parse(values, directory)


def read_engine_config(directory: Path) -> tuple[CheckpointConfig, Mapping[str, Any]]:
    """The model's configuration and the whole config.json of an engine. Raises ForgeError for another directory."""
    values = _read(directory)
    if "architectures" in values and "architecture" not in values:
        quoted = quote(str(directory))
        raise ForgeError(
            f"{directory} is an llmapi engine or a Hugging Face checkpoint: the embedded engine does not run it",
            hint=f"Of a checkpoint, `trtforge build {quoted}` makes an engine and its repository; serve the repository "
            "of an llmapi engine.",
        )
    if "pretrained_config" not in values or "build_config" not in values:
        checkpoint = quote(str(directory)) if "architecture" in values else "CHECKPOINT"
        hint = f"Run `trtforge compile {checkpoint} ENGINE` and give its result."
        raise ForgeError(f"{directory} is not an engine", hint=hint)
    _require_objects(values, ("pretrained_config", "build_config", "forge"), directory)
    _require_objects(values["build_config"], ("plugin_config",), directory)
    return _parse(values["pretrained_config"], directory), values


def _require_objects(values: Mapping[str, Any], keys: tuple[str, ...], directory: Path) -> None:
    for key in keys:
        part = values.get(key)
        if not isinstance(part, dict) and (part is not None or (key in values and key != "plugin_config")):
            raise ForgeError(
                f"{directory / CONFIG_FILE}: {key} is {part!r:.60}, not an object", hint="Make the directory again."
            )


def is_engine(directory: Path) -> bool:
    """Whether `directory` is an engine (of any backend) rather than a checkpoint."""
    return "pretrained_config" in _read(directory)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is a TensorRT-LLM checkpoint."""
    try:
        return "architecture" in _read(directory)
    except ForgeError:
        return False


def is_hugging_face(directory: Path) -> bool:
    """Whether a directory is a Hugging Face checkpoint, not one of TensorRT-LLM's."""
    try:
        values = _read(directory)
    except ForgeError:
        return False
    return "architectures" in values and "architecture" not in values


def _read(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    hint = "Make the directory again."
    if not directory.is_dir():
        raise no_directory(directory, otherwise="Give a checkpoint or engine directory.")
    inside = [str(directory / part) for part in ("checkpoint", "engine") if (directory / part / CONFIG_FILE).is_file()]
    absent = f"Give {' or '.join(inside)}." if inside else "Give a checkpoint or engine directory."
    if any(directory.glob("*/config.pbtxt")):
        absent = f"It is a Triton model repository: `trtforge serve {quote(str(directory))}`, or give its engine."
    elif not path.exists() and (made := read_manifest(directory)) is not None:
        stage, use = made.identity.stage, use_of(directory, made.identity.stage)
        absent = f"It is a {stage}{f': `{use}`' if use else ''}. {absent}"
        if stage in ("checkpoint", "engine"):
            absent = f"It is a damaged {stage}, without this file: make it again."
    values = read_json_object(path, hint=hint, absent=absent)
    require_plausible(values, str(path), hint)
    return values


def _parse(values: Mapping[str, Any], directory: Path) -> CheckpointConfig:
    return config_of(values, str(directory / CONFIG_FILE))


def config_of(values: Mapping[str, Any], where: str) -> CheckpointConfig:
    """The configuration of a network. Raises ForgeError naming `where` and the wrong key."""
    require_values(values, where)
    try:
        return CheckpointConfig.model_validate(_completed(values))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise ForgeError(f"{where}: {key}: {problem['msg']}", hint="Make the directory again with trtforge.") from None


def _completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with TensorRT-LLM's defaults for absent ones (`PretrainedConfig`, and the architecture's class)."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    sizes: dict[str, object] = {}
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        sizes = {"num_key_value_heads": heads, "head_size": hidden // heads, "intermediate_size": 4 * hidden}
    base = base_architecture(str(values.get("architecture")), values.get("model_type"))
    return {**sizes, **_DEFAULTS.get(base, {}), **values}
