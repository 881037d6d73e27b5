"""The model of any TensorRT-LLM checkpoint, from its config.json and the headers of its rank files.

A checkpoint has one layout and one format, which a plan cannot change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.formats.foreign import foreign_note, require_rank_files
from trtforge.formats.hf import HfConfig
from trtforge.formats.shards import StoredTensor, read_header
from trtforge.formats.trtllm import (
    CARRIED_FILE,
    CONFIG_FILE,
    CheckpointConfig,
    is_checkpoint,
    rank_file,
    read_checkpoint_config,
)
from trtforge.models.checkpoint_sizes import sizes_of
from trtforge.models.families.multimodal import VISION
from trtforge.models.family import AbsorbedQuery, Embedding, Fact, Facts, Family, Linear, Size, Sizes
from trtforge.models.registry import architectures, family_of_engine
from trtforge.plan.model import MAIN, Model, find_model
from trtforge.plan.weights import tensor_name

_BY_LAYER: frozenset[Fact] = frozenset(
    {"sparse_layer", "dense_layer", "shared_layer", "linear_layer", "attention_layer"}
)
_ROUTER = "mlp.router.weight"


def model_to_plan(source: str, revision: str = MAIN) -> Model:
    """The model in a checkpoint's directory, or by `find_model` otherwise. Raises ForgeError as `find_model` does."""
    directory = Path(source)
    if directory.is_dir() and is_checkpoint(directory):
        return model_of_checkpoint(source, directory)
    return find_model(source, revision)


def model_of_checkpoint(name: str, directory: Path) -> Model:
    """The model of a TensorRT-LLM checkpoint. Raises ForgeError for rank files that contradict its config.json."""
    config = read_checkpoint_config(directory)
    family = family_of_engine(config.base_architecture)
    if family is None:
        raise ForgeError(
            f"architecture {config.architecture} is not supported",
            hint=f"`trtforge compile` plans its engine with --dry-run. Supported: {', '.join(architectures())}.",
        )
    require_rank_files(directory, config.parallel)
    _require_complete(config, family, directory)
    stored = [read_header(directory / rank_file(rank.index)) for rank in config.parallel.ranks]
    facts = _facts(config, family, stored)
    if bool(facts.sparse_layers) != (config.experts > 0):
        found = f"{len(facts.sparse_layers)} layers with routers"
        raise ForgeError(
            f"{directory}: config.json says {config.experts} experts, the rank files hold {found}",
            hint="config.json and the weights do not match: make the directory again.",
        )
    values = {"architectures": [config.base_architecture], "torch_dtype": config.dtype}
    return Model(
        name,
        HfConfig(values, directory / CONFIG_FILE),
        family,
        facts,
        stored_bytes=sum(tensor.spec.nbytes for tensors in stored for tensor in tensors),
        checkpoint=config,
        vision_bytes=_vision_bytes(directory),
        notes=tuple(filter(None, [foreign_note(directory)])),
    )


def _vision_bytes(directory: Path) -> int:
    """Bytes of the vision part, which conversion copies."""
    path = directory / CARRIED_FILE
    tensors = read_header(path) if path.is_file() else ()
    return sum(tensor.spec.nbytes for tensor in tensors if tensor.spec.name.startswith(VISION))


def _require_complete(config: CheckpointConfig, family: Family, directory: Path) -> None:
    """Raises ForgeError for fields that the family's sizes need but config.json lacks."""
    more = config.model_extra or {}
    latent = any(isinstance(row, AbsorbedQuery) for row in family.layer)
    needed = ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"] if latent else []
    missing = [key for key in needed if _number(more, key) < 1]
    moe = more.get("moe")
    if config.experts and not _number(moe if isinstance(moe, dict) else {}, "top_k"):
        missing.append("moe.top_k")
    if missing:
        raise ForgeError(
            f"{directory / CONFIG_FILE}: {missing[0]} is not a whole number from 1",
            hint="Make the directory again.",
        )


def _facts(config: CheckpointConfig, family: Family, stored: list[tuple[StoredTensor, ...]]) -> Facts:
    layers, others = _names(config, stored)
    sizes = cached_sizes(config)
    known = dict(sizes.more)
    if config.experts:
        known["gate_up"] = 2 * known.setdefault("moe_intermediate", config.intermediate_size)
    more = config.model_dump()
    return Facts(
        sizes=replace(sizes, more=known),
        tied_embeddings=config.tie_word_embeddings,
        config={key: value for key, value in more.items() if key not in ("mapping", "quantization")},
        holding=frozenset(_holding(family, frozenset().union(others, *layers.values()))),
        sparse_layers=frozenset(layer for layer, names in layers.items() if _ROUTER in names),
    )


def _names(
    config: CheckpointConfig, stored: list[tuple[StoredTensor, ...]]
) -> tuple[Mapping[int, frozenset[str]], frozenset[str]]:
    """Names of the tensors in each layer of the whole model, without prefix, and of the tensors outside layers."""
    parallel: Parallel = config.parallel
    layers: dict[int, set[str]] = {layer: set() for layer in range(config.num_hidden_layers)}
    others = set()
    for rank, tensors in zip(parallel.ranks, stored, strict=True):
        first = parallel.layers_of(rank.pp_rank, config.num_hidden_layers).start
        for tensor in tensors:
            place, found, rest = tensor.spec.name.partition("transformer.layers.")
            number, _, name = rest.partition(".")
            if found and not place and number.isdecimal() and first + int(number) in layers:
                layers[first + int(number)].add(name)
            else:
                others.add(tensor.spec.name)
    return {layer: frozenset(names) for layer, names in layers.items()}, frozenset(others)


def _holding(family: Family, names: frozenset[str]) -> Iterator[Fact]:
    """The facts whose tensors are in the checkpoint. Of facts that share a tensor, the one with the most tensors."""
    rows: dict[Fact, set[str]] = {}
    for row in (*family.layer, *family.model):
        if isinstance(row, Linear) and row.bias is not None and f"{row.target}.bias" in names:
            yield row.bias
        fact = None if isinstance(row, Embedding) else row.when
        if fact is not None and fact not in _BY_LAYER:
            rows.setdefault(fact, set()).add(tensor_name(row))
    claimed: set[str] = set()
    for fact, wanted in sorted(rows.items(), key=lambda item: -len(item[1])):
        if wanted <= names and not wanted & claimed:
            claimed |= wanted
            yield fact


def cached_sizes(config: CheckpointConfig) -> Sizes:
    """The sizes of a checkpoint's model, with those of multi-head latent attention, on which its KV cache depends."""
    sizes = sizes_of(config)
    return replace(sizes, more={**sizes.more, **_latent_sizes(config)})


def _latent_sizes(config: CheckpointConfig) -> Mapping[Size, int]:
    """The sizes of multi-head latent attention; none for other networks."""
    heads, more = config.num_attention_heads, config.model_extra or {}
    lora, rope = _number(more, "kv_lora_rank"), _number(more, "qk_rope_head_dim")
    nope = _number(more, "qk_nope_head_dim")
    if not lora:
        return {}
    return {
        "q_lora": _number(more, "q_lora_rank"),
        "kv_lora": lora,
        "kv_a": lora + rope,
        "q_b": heads * (nope + rope),
        "k_nope": heads * nope,
        "q_pe": heads * rope,
    }


def _number(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0
