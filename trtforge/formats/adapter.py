"""LoRA adapters in PEFT's format: adapter_config.json, rank and changed layers. Reads no weights."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig, LoraFeature, LoraModule
from trtforge.core.json_text import read_json
from trtforge.core.recipe import ResolvedBackend
from trtforge.formats.shards import read_header

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")
ADAPTERS_DIRECTORY = "adapters"
"""The directory of an engine's adapters, each in a subdirectory named by its task id."""

DEFAULT_RANK = 64
DEFAULT_MODULES: tuple[LoraModule, ...] = ("attn_q", "attn_k", "attn_v")

_OF_LLM_API: Mapping[str, LoraModule] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
}
"""Layers that the LLM API loads: `get_default_trtllm_modules_to_hf_modules` in tensorrt_llm/lora_manager.py."""
_OF_ENGINES: Mapping[str, LoraModule] = {"qkv_proj": "attn_qkv", "gate_up_proj": "mlp_h_to_4h"}
"""Further layers that TensorRT-LLM's engines have: models/phi3/model.py."""
_OF_TORCH: Mapping[str, LoraModule] = {
    "c_attn": "attn_qkv",
    "query_key_value": "attn_qkv",
    "attn.c_proj": "attn_dense",
    "dense": "attn_dense",
    "out_proj": "attn_dense",
    "c_fc": "mlp_h_to_4h",
    "dense_h_to_4h": "mlp_h_to_4h",
    "fc1": "mlp_h_to_4h",
    "fc_in": "mlp_h_to_4h",
    "mlp.c_proj": "mlp_4h_to_h",
    "dense_4h_to_h": "mlp_4h_to_h",
    "fc2": "mlp_4h_to_h",
    "fc_out": "mlp_4h_to_h",
}
"""Layers of GPT-2, GPT-BigCode, StarCoder2, Falcon, GPT-NeoX, Bloom, Phi, GPT-J and OPT, which the embedded engine has.

TensorRT-LLM cannot load adapters of GPT-2, GPT-BigCode, Falcon, GPT-NeoX and Bloom: examples/hf_lora_convert.py skips
tensors other than those of `layers.N.self_attn` and `layers.N.mlp`, does not sort interleaved rows of query, key and
value, and the runtime cuts B of attn_qkv into equal shares for its ranks (cpp/tensorrt_llm/runtime/loraModule.cpp).
"""
PEFT_MODULES: Mapping[str, LoraModule] = MappingProxyType({**_OF_LLM_API, **_OF_ENGINES, **_OF_TORCH})
"""LoRA modules by the names of Hugging Face's layers, or by the ends of the names."""

_SAVED = "Give the directory that PEFT saved."
MERGE_ADAPTER = "Merge it into the model (`merge_and_unload` of PEFT) and build that."
_LORA = "LORA"
_ALWAYS_ACTIVE = "Train it as plain LoRA, without invocation tokens: a merged adapter is active for all tokens."
_QKV: tuple[LoraModule, ...] = ("attn_q", "attn_k", "attn_v")


class _AdapterFile(BaseModel):
    """The content of adapter_config.json; absent keys have PEFT's defaults (`LoraConfig` in
    src/peft/tuners/lora/config.py)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    r: int = Field(8, ge=1)
    target_modules: tuple[str, ...] | str | None
    lora_alpha: float = Field(8.0, allow_inf_nan=False)
    use_rslora: bool = False
    alpha_pattern: dict[str, float] = {}
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = {}
    modules_to_save: tuple[str, ...] | None = None
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    init_lora_weights: bool | str | None = True
    layer_replication: object = None
    alora_invocation_tokens: object = None
    trainable_token_indices: object = None
    target_parameters: object = None
    use_bdlora: object = None
    use_qalora: bool = False
    kasa_config: object = None
    monteclora_config: object = None
    arrow_config: object = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The possible ranks of a layer."""
        return (self.r, *self.rank_pattern.values())

    @property
    def beyond_lora(self) -> str | None:
        """A function of the adapter beyond adding B A x to the outputs of linear layers; None if there is none."""
        first = str(self.init_lora_weights).lower()
        known = {
            "non-LoRA weights": self.modules_to_save or self.trainable_token_indices,
            "DoRA": self.use_dora,
            "biases": self.bias != "none" or self.lora_bias,
            f"{first} initialization, which changes the model's own weights": first.startswith(_CHANGES_THE_MODEL),
            "alpha_pattern, which TensorRT-LLM ignores": self.alpha_pattern,
            "layer_replication, which repeats the model's layers": self.layer_replication,
            "alora_invocation_tokens, from which on alone it is active": self.alora_invocation_tokens,
            "target_parameters, which are no linear layers": self.target_parameters,
            "use_bdlora": self.use_bdlora,
            "use_qalora": self.use_qalora,
            "kasa_config": self.kasa_config,
            "monteclora_config": self.monteclora_config,
            "arrow_config": self.arrow_config,
        }
        return next((what for what, is_set in known.items() if is_set), None)


_NEVER_NULL = ("r", "lora_alpha", "target_modules")
"""Keys that have a value; null means PEFT's default for the others."""
_CHANGES_THE_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or their beginnings: `reset_lora_parameters` of PEFT (src/peft/tuners/lora/layer.py)
subtracts B A from the layer's weights, both in training and when the adapter is loaded."""


@dataclass(frozen=True)
class Adapter:
    """The properties for which an engine must be built: the largest rank and the layers, by TensorRT-LLM's names.

    `layers`: the layers by the names of Hugging Face.
    """

    rank: int
    modules: tuple[LoraModule, ...]
    layers: tuple[str, ...]


def adapter_scale(directory: Path, rank: int) -> float:
    """The factor of the product B A of a layer of this rank: alpha / rank, or rsLoRA's alpha / sqrt(rank).

    Source: `LoraLayer.update_layer` of PEFT (src/peft/tuners/lora/layer.py). `fan_in_fan_out` is not read: it says that
    the layer's own weights are transposed (GPT-2's Conv1D); A is (rank, inputs) and B (outputs, rank) all the same.
    Raises ForgeError for a rank that the adapter's configuration does not have.
    """
    path = directory / ADAPTER_CONFIG
    file = _read(path)
    if rank not in file.ranks:
        known = " or ".join(map(str, sorted(set(file.ranks))))
        raise ForgeError(f"{path}: its layers have rank {known}, but its tensors have {rank}", hint=_SAVED)
    return file.lora_alpha / (rank**0.5 if file.use_rslora else rank)


def _read(path: Path) -> _AdapterFile:
    values = read_json(path, hint=_SAVED)
    kind = values.get("peft_type") or _LORA if isinstance(values, dict) else _LORA
    if kind != _LORA:
        message = f"{path}: peft_type is {kind}, engines apply adapters of type {_LORA} alone"
        raise ForgeError(message, hint=MERGE_ADAPTER)
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if value is not None or key in _NEVER_NULL}
    try:
        return _AdapterFile.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"][:1])
        said = f"{key}: {problem['msg']}" if key else problem["msg"]
        raise ForgeError(f"{path}: not the configuration of a LoRA adapter: {said}", hint=_SAVED) from None


def read_adapter(directory: Path) -> Adapter:
    """An adapter's rank and modules. Raises ForgeError naming the file if engines cannot run it as LoRA."""
    path = directory / ADAPTER_CONFIG
    file = _read(path)
    if file.beyond_lora is not None:
        raise ForgeError(
            f"{path}: the adapter has {file.beyond_lora}, which an engine cannot load with a LoRA request",
            hint=_ALWAYS_ACTIVE if file.alora_invocation_tokens else MERGE_ADAPTER,
        )
    names = _target_modules(directory, file)
    found = {name: modules_of(name) for name in names}
    unknown = [name for name, modules in found.items() if not modules]
    if unknown:
        raise ForgeError(
            f"{path}: it changes {unknown[0]}, which engines do not support",
            hint=f"{MERGE_ADAPTER} Engines apply adapters of {', '.join(PEFT_MODULES)}.",
        )
    layers = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return Adapter(max(file.ranks), _ordered({each for modules in found.values() for each in modules}), tuple(layers))


def modules_of(layer: str) -> tuple[LoraModule, ...]:
    """The modules of a Hugging Face layer by the end of its name.

    Several if the name stands for several layers (`c_proj`), none if engines do not support it.
    """
    *before, name = layer.split(".")
    if name in PEFT_MODULES:
        return (PEFT_MODULES[name],)
    if before:
        module = PEFT_MODULES.get(f"{before[-1]}.{name}")
        return () if module is None else (module,)
    return tuple(module for known, module in PEFT_MODULES.items() if known.endswith(f".{name}"))


def require_layers_of(lora: LoraFeature, backend: ResolvedBackend) -> None:
    """Raises ForgeError for an adapter with layers that an engine of this backend does not load."""
    if backend == "torch":
        return
    for directory in lora.adapters:
        layers = read_adapter(Path(directory)).layers
        fused = [layer for layer in layers if layer in _OF_ENGINES and backend == "llmapi"]
        if fused:
            raise ForgeError(
                f"{directory} changes {fused[0]}, which the LLM API's releases load differently or not at all",
                hint=MERGE_ADAPTER,
            )
        others = [layer for layer in layers if layer not in _OF_LLM_API and layer not in _OF_ENGINES]
        if others:
            raise ForgeError(
                f"{directory} changes {others[0]}, of which only the embedded engine applies adapters",
                hint="Use engine.backend: torch, or build a merged model (`merge_and_unload` of PEFT).",
            )


def weights_file(directory: Path) -> Path:
    """The file of an adapter's tensors. Raises ForgeError if it does not exist."""
    return _existing(directory, ADAPTER_FILES[1])


def _existing(directory: Path, name: str) -> Path:
    if not (directory / name).is_file():
        raise ForgeError(
            f"{directory} has no {name}",
            hint="Give the directory that PEFT saved, with safetensors: pickles (adapter_model.bin) are not read.",
        )
    return directory / name


def _target_modules(directory: Path, file: _AdapterFile) -> Sequence[str]:
    """The names of the layers that an adapter changes; if they are given as a pattern, those in its tensors' names.

    PEFT accepts additional names that the model does not have; they are left out by means of the tensors' names. So a
    name that may stand for several layers stands for those of the model.
    """
    names = file.target_modules
    if isinstance(names, tuple) and not (directory / ADAPTER_FILES[1]).is_file():
        return names
    tensors = (stored.spec.name for stored in read_header(weights_file(directory)))
    layers = tuple(dict.fromkeys(name.partition(".lora_")[0] for name in tensors))
    if not isinstance(names, tuple):
        return layers
    found: list[str] = []
    for name in names:
        own = [layer for layer in layers if f".{layer}".endswith(f".{name}")]
        if len(modules_of(name)) > 1:
            found += own
        elif own:
            found.append(name)
    return found or names


def resolved_lora(lora: LoraFeature) -> LoraFeature:
    """The feature with rank and modules resolved and without adapters, which are not part of an engine.

    Query, key and value are always together: TensorRT-LLM adds the missing ones (tensorrt_llm/lora_manager.py,
    `get_missing_qkv_modules`). Raises ForgeError for adapters that do not fit the given rank or modules.
    """
    adapters = [(name, read_adapter(Path(name))) for name in lora.adapters]
    for name, adapter in adapters:
        if lora.max_rank is not None and adapter.rank > lora.max_rank:
            raise ForgeError(
                f"{name}: rank {adapter.rank} is more than engine.features.lora.max_rank {lora.max_rank}",
                hint=f"Use max_rank {adapter.rank}, or leave it out.",
            )
        missing = [module for module in adapter.modules if lora.modules and module not in lora.modules]
        if missing:
            raise ForgeError(
                f"{name} changes {missing[0]}, which engine.features.lora.modules leaves out",
                hint=f"Add {missing[0]}, or leave modules out.",
            )
    rank = lora.max_rank or max((adapter.rank for _, adapter in adapters), default=DEFAULT_RANK)
    modules = set(lora.modules) or {module for _, adapter in adapters for module in adapter.modules}
    modules = modules or set(DEFAULT_MODULES)
    if modules & set(_QKV):
        modules |= set(_QKV)
    return lora.model_copy(update={"adapters": (), "max_rank": rank, "modules": _ordered(modules)})


def resolved_features(features: FeaturesConfig) -> FeaturesConfig:
    """The features of an engine: all values resolved, no paths. Raises ForgeError as `resolved_lora` does."""
    lora, draft = features.lora, features.draft
    if lora is not None:
        features = features.model_copy(update={"lora": resolved_lora(lora)})
    if draft is not None:
        features = features.model_copy(update={"draft": draft.model_copy(update={"model": None, "engine": None})})
    return features


def adapter_names(adapters: Sequence[str]) -> tuple[str, ...]:
    """The names of an engine's adapters, from their directories. Raises ForgeError for equal names.

    The task id of an adapter is its position, from 1.
    """
    names = tuple(Path(os.path.abspath(path)).name for path in adapters)  # not the target of a link
    for name in names:
        if re.fullmatch(r"[\w.-]{1,100}", name) is None:
            raise ForgeError(
                f"engine.features.lora.adapters: the directory's name {name!r} is not a model name",
                hint="Rename it to letters, digits, '.', '_' and '-'.",
            )
        if names.count(name) > 1:
            raise ForgeError(
                f"engine.features.lora.adapters: two directories are called {name}", hint="Rename one of them."
            )
    return names


def named_adapters(text: str) -> Mapping[str, int]:
    """Task ids by name, from a text such as `sql:1,chat:2`; parts without a number are ignored."""
    pairs = (pair.rpartition(":") for pair in text.split(",") if pair)
    return {name: int(task) for name, _, task in pairs if name and task.isdecimal()}


def adapter_files(adapters: Sequence[str | Path]) -> Iterator[tuple[str, Path]]:
    """Each file of the adapters that belongs in an engine, with its directory below the engine's.

    Raises ForgeError for a missing file.
    """
    for number, directory in enumerate(map(Path, adapters), start=1):
        for name in ADAPTER_FILES:
            yield f"{ADAPTERS_DIRECTORY}/{number}", _existing(directory, name)


def _ordered(modules: set[LoraModule]) -> tuple[LoraModule, ...]:
    order = list(dict.fromkeys([*_QKV, *PEFT_MODULES.values()]))
    return tuple(sorted(modules, key=order.index))
