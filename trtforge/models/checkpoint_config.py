"""The config.json of a checkpoint, from the family's facts and the layout."""

from collections.abc import Iterator

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import QuantFormat
from trtforge.formats.eagle_checkpoint import EAGLE_MODULES
from trtforge.formats.medusa import MEDUSA_MODULES
from trtforge.formats.trtllm import (
    LAYERS_FILE,
    MIXED_PRECISION,
    UNQUANTIZED_MODULES,
    CheckpointConfig,
    LayerQuantization,
    Quantization,
)
from trtforge.models.checkpoint_plan import Layout, shards_embedding
from trtforge.models.exclusions import exclude_names, excluded_modules, linear_names, linear_rows
from trtforge.models.family import AbsorbedQuery, Facts, Family
from trtforge.models.formats import CACHE_ALGORITHMS, FORMATS, algorithm_of

_WEIGHT_ONLY = ("*shared_expert_gate.weight",)
"""Excluded by tensor name, because in weight-only formats the build quantises (TensorRT-LLM 1.x,
models/modeling_utils.py)."""
_LATENT = ("*fused_a", "*fused_a.weight")
"""MLA's compression, which TensorRT-LLM's converter does not quantise but the weight-only formats would
(models/deepseek_v2)."""
_ROWWISE = ("*ln_f", "*ln_embed")
"""Norms whose output no quantised layer reads. 0.17 excludes them only without a list; later releases add them to any
list (`fp8_rowwise_quantize` in quantization/quantize.py)."""
ALWAYS_EXCLUDED = frozenset({*_WEIGHT_ONLY, *_LATENT, *_ROWWISE, MEDUSA_MODULES, EAGLE_MODULES})
"""Modules that conversion adds to TensorRT-LLM's defaults; the user excluded all others in the list."""


def checkpoint_config(family: Family, facts: Facts, architecture: str, layout: Layout) -> CheckpointConfig:
    """The config.json. Raises ForgeError for excluded modules that it cannot express (models.exclusions)."""
    sizes = facts.sizes
    return CheckpointConfig.model_validate(
        {
            "architecture": family.architectures[architecture],
            "dtype": layout.dtype,
            "logits_dtype": "float32",
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_size": sizes.head_size,
            "intermediate_size": sizes.intermediate,
            "max_position_embeddings": sizes.max_positions,
            "use_parallel_embedding": shards_embedding(family, layout),
            "embedding_sharding_dim": layout.embedding_sharding_dim,
            "tie_word_embeddings": facts.tied_embeddings,
            **facts.config,
            "mapping": layout.parallel.mapping(),
            "quantization": Quantization(
                quant_algo=MIXED_PRECISION if layout.mixed else FORMATS[layout.quant].algorithm,
                kv_cache_quant_algo=CACHE_ALGORITHMS[layout.kv_cache],
                group_size=layout.group_size,
                pre_quant_scale=FORMATS[layout.quant].smoothing == "awq",
                exclude_modules=_exclude_modules(family, facts, layout),
                quantized_layers=_quantized_layers(family, facts, layout),
            ),
        }
    )


def _exclude_modules(family: Family, facts: Facts, layout: Layout) -> list[str] | None:
    """The modules that are not quantised: TensorRT-LLM's defaults and those that the source or the user excludes."""
    if layout.quant == "none":
        return None
    names: tuple[str, ...] = ()
    if layout.source:
        quantizes, hint = layout.source.quantizes, "Use --pp 1, or convert the original checkpoint."
        names = exclude_names(
            family, facts, layout.parallel, lambda module: not quantizes(module), who="the source leaves", hint=hint
        )
    elif layout.exclude_modules:
        excluded = excluded_modules(family, facts, layout.exclude_modules)
        hint = "Use --pp 1, or exclude the same layers of every stage."
        names = exclude_names(
            family, facts, layout.parallel, excluded.__contains__, who="exclude_modules leaves", hint=hint
        )
    if FORMATS[layout.quant].rounding is None:
        latent = _LATENT if any(isinstance(row, AbsorbedQuery) for row in family.layer) else ()
        return [*UNQUANTIZED_MODULES, *names, *(f"{name}.weight" for name in names), *_WEIGHT_ONLY, *latent]
    rowwise = _ROWWISE if FORMATS[layout.quant].rounding == "fp8_rowwise" else ()
    return [*UNQUANTIZED_MODULES, *rowwise, *names]


def _quantized_layers(family: Family, facts: Facts, layout: Layout) -> dict[str, LayerQuantization] | None:
    """The formats of the quantised linear layers of mixed precision, by TensorRT-LLM's names."""
    if not layout.mixed:
        return None
    if layout.parallel.pp > 1:
        raise ForgeError(
            f"mixed precision in {layout.parallel.pp} pipeline stages: TensorRT-LLM numbers layers from 0 in each "
            "stage and has one list of formats for all",
            hint="Use --pp 1.",
        )
    chosen, found = dict(layout.formats), {}
    for name, modules in linear_names(family, facts):
        quant = chosen.get(modules[0], layout.quant)
        if layout.source is not None:
            own = layout.source.of(modules[0])
            quant = "none" if own is None else own.format
        algorithm = FORMATS[quant].algorithm
        if algorithm is not None:
            grouped = FORMATS[quant].rounding == "int4"
            found[name] = LayerQuantization(
                quant_algo=algorithm,
                group_size=layout.group_size,
                pre_quant_scale=grouped and FORMATS[quant].smoothing == "awq",
            )
    return found


def formats_in(config: CheckpointConfig, family: Family, facts: Facts) -> tuple[tuple[str, QuantFormat], ...]:
    """The format of each linear layer of a mixed-precision checkpoint, by Hugging Face name; empty for others."""
    layers = config.quantization.quantized_layers
    if layers is None:
        return ()
    return tuple(
        (module, _format_of(name, layers[name], config) if name in layers else "none")
        for name, modules in linear_names(family, facts)
        for module in modules
    )


def formats_by_row(config: CheckpointConfig, family: Family, facts: Facts) -> Iterator[tuple[int, str, QuantFormat]]:
    """The format of every linear layer of a mixed-precision checkpoint, after its decoder layer's number and its name
    in that layer; empty for other checkpoints."""
    layers = config.quantization.quantized_layers
    if layers is not None:
        for stage in range(config.parallel.pp):
            for layer, name, row in linear_rows(family, facts, config.parallel, stage):
                yield layer, row.target, _format_of(name, layers[name], config) if name in layers else "none"


def _format_of(name: str, layer: LayerQuantization, config: CheckpointConfig) -> QuantFormat:
    """The format of a layer. Raises ForgeError for an algorithm or group size not supported in mixed precision."""
    known = {wanted.algorithm: quant for quant, wanted in FORMATS.items() if wanted.algorithm is not None}
    hint = f"Layers may have {', '.join(sorted(known))}, and groups of one size."
    if layer.quant_algo not in known:
        raise ForgeError(f"{LAYERS_FILE}: {name} has the algorithm {layer.quant_algo}", hint=hint)
    size = config.quantization.group_size
    if FORMATS[known[layer.quant_algo]].rounding == "int4" and layer.group_size not in (None, size):
        raise ForgeError(f"{LAYERS_FILE}: {name} has groups of {layer.group_size}, config.json of {size}", hint=hint)
    return known[layer.quant_algo]


def layout_of_checkpoint(config: CheckpointConfig) -> Layout | None:
    """The layout of a checkpoint; None if its quantisation is not among FORMATS.

    For mixed precision it has the format of grouped layers, but not `formats`, which depend on the family.
    """
    quantization = config.quantization
    quant = next((name for name, wanted in FORMATS.items() if wanted.algorithm == algorithm_of(quantization)), None)
    kv_cache = next((n for n, algo in CACHE_ALGORITHMS.items() if algo == quantization.kv_cache_quant_algo), None)
    if quant is None or kv_cache is None:
        return None
    return Layout(
        parallel=config.parallel,
        dtype=config.dtype,
        quant=quant,
        kv_cache=kv_cache,
        group_size=quantization.group_size,
        parallel_embedding=config.use_parallel_embedding,
        embedding_sharding_dim=config.embedding_sharding_dim,
    )
