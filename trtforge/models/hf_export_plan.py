"""Export plan of a TensorRT-LLM checkpoint: every Hugging Face tensor, in ModelOpt's unified layout, and its source.

`tensor_origins` locates each tensor in the rank files; the scaling factors beside it determine its packing. Layouts:
ModelOpt export/unified_export_hf.py (0.47); the parts that TensorRT-LLM reads: tensorrt_llm/_torch/modules/linear.py
(1.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from trtforge.core.dtypes import Dtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.shards import StoredTensor, TensorSpec
from trtforge.formats.trtllm import MIXED_PRECISION, CheckpointConfig
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout, checkpoint_plan
from trtforge.models.content import Cast
from trtforge.models.family import Facts, Family
from trtforge.models.hf_stacks import stacked
from trtforge.models.hf_tensors import OF_THE_DIRECTORY, Block, Blocks, HfPlan, HfTensor, Scalar, cover
from trtforge.models.pre_quant import PreQuant, pre_quants
from trtforge.models.prequantized_targets import attention_module
from trtforge.models.tensor_origins import Origin, origins

FLOAT32 = dtype_named("float32")
HF_ALGORITHMS = (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_AWQ", "NVFP4", MIXED_PRECISION)
"""The algorithms that both layouts support."""

_SCALED_ROWS = ("FP8_PER_CHANNEL_PER_TOKEN", "W4A16_AWQ", MIXED_PRECISION)
"""Those with a scale per output, which some loaders of TensorRT-LLM do not split like the weights (1.3.0rc3)."""
Stored = Sequence[Mapping[str, StoredTensor]]
"""The tensors of each rank file, by name."""


def hf_plan(family: Family, facts: Facts, config: CheckpointConfig, stored: Stored) -> HfPlan:
    """The Hugging Face tensors of a checkpoint's rank files.

    Raises ForgeError for a format that the unified layout lacks, for tensors without an inverse, and for an AWQ
    checkpoint whose gate and up projections have different pre-quantisation scales.
    """
    require_format(config)
    layout = Layout(
        parallel=config.parallel,
        dtype=config.dtype,
        parallel_embedding=config.use_parallel_embedding,
        embedding_sharding_dim=config.embedding_sharding_dim,
    )
    return stacked(_Inverse(family, facts, config, stored, layout).plan(), family)


def require_format(config: CheckpointConfig) -> None:
    """Raises ForgeError for a checkpoint whose number formats have no unified Hugging Face layout."""
    quantization = config.quantization
    if quantization.quant_algo not in HF_ALGORITHMS:
        raise ForgeError(
            f"{quantization.quant_algo} is not supported in a Hugging Face checkpoint for the LLM API",
            hint="Convert with --quant none, fp8, fp8_rowwise, int4_awq or nvfp4.",
        )
    cache = quantization.kv_cache_quant_algo
    if cache not in (None, "FP8"):
        raise ForgeError(
            f"the {cache} KV cache is not supported in a Hugging Face checkpoint for the LLM API",
            hint="Convert with --kv-cache fp8 or none.",
        )
    if quantization.quant_algo == "W4A16_AWQ" and config.experts:
        raise ForgeError(
            "W4A16_AWQ experts are not supported in a Hugging Face checkpoint for the LLM API: their pre-quantisation "
            "scale cannot be folded into a normalisation that the router reads too",
            hint="Convert with --quant fp8.",
        )
    if quantization.quant_algo in _SCALED_ROWS:
        _require_scaled_rows(config, quantization.quant_algo)


def _require_scaled_rows(config: CheckpointConfig, algorithm: str) -> None:
    """Raises ForgeError if TensorRT-LLM's PyTorch backend cannot load scales per output.

    `load_weights` of modeling_phi3.py indexes them by two dimensions and packed weights by output;
    `_duplicate_kv_weights` of checkpoints/hf/weight_mapper.py repeats weights of KV heads, and scales of NVFP4 only.
    """
    heads, tp = config.num_key_value_heads, config.parallel.tp
    if config.architecture == "Phi3ForCausalLM":
        raise ForgeError(
            f"TensorRT-LLM's PyTorch backend cannot load Phi-3 in {algorithm}",
            hint="Convert with --quant fp8, nvfp4 or none.",
        )
    if tp > heads:
        raise ForgeError(
            f"TensorRT-LLM's PyTorch backend cannot load {algorithm} with {heads} KV heads on tp {tp}: it repeats the "
            "heads' weights, and not their scales",
            hint=f"Use tp {heads} or less, or --quant fp8, nvfp4 or none.",
        )


class _Inverse:
    def __init__(self, family: Family, facts: Facts, config: CheckpointConfig, stored: Stored, layout: Layout) -> None:
        self.family, self.facts, self.config, self.stored = family, facts, config, stored
        self.layout, self.dtype = layout, dtype_named(config.dtype)
        self.group_size = config.quantization.group_size
        self.vectors: Mapping[str, PreQuant] = {}

    def plan(self) -> HfPlan:
        plain = checkpoint_plan(self.family, self.facts, self.layout)
        _require_invertible(plain)
        found: dict[str, list[Origin]] = {}
        for origin in origins(plain, self.layout):
            found.setdefault(origin.piece.source, []).append(origin)
        if self.config.quantization.quant_algo in ("W4A16_AWQ", MIXED_PRECISION):
            self.vectors = pre_quants(self.family, self.facts, self.layout, self.stored)
        folded = {name: vector for vector in self.vectors.values() for name in vector.into}
        tensors: list[HfTensor] = []
        unquantized, algorithms = [], dict[str, str]()
        for source, parts in found.items():
            own = tuple(self._tensors(source, parts, folded.get(source)))
            tensors += own
            if len(own) == 1 and len(own[0].spec.shape) > 1:
                unquantized.append(source.removesuffix(".weight"))
            elif len(own) > 1:
                algorithms[source.removesuffix(".weight")] = _algorithm([tensor.spec for tensor in own])
        tensors += self._kv_scales()
        mixed = self.config.quantization.quant_algo == MIXED_PRECISION
        return HfPlan(tuple(tensors), tuple(sorted(unquantized)), dict(sorted(algorithms.items())) if mixed else None)

    def _tensors(self, source: str, parts: list[Origin], fold: PreQuant | None) -> Iterator[HfTensor]:
        """The tensor of this name, or in a quantised checkpoint its packed form with its scaling factors."""
        first, module = parts[0], source.removesuffix(".weight")
        weight = self._of(first.rank, first.target.name)
        base = first.target.name.removesuffix(".weight")
        scales, rows = f"{base}.weights_scaling_factor", f"{base}.per_channel_scale"
        held = self.stored[first.rank]
        if base == first.target.name or (scales not in held and rows not in held):
            yield self._plain(source, parts, fold)
        elif rows in held:
            yield self._packed(f"{module}.weight", parts)
            yield self._column(f"{module}.weight_scale", parts)
        elif weight.spec.dtype.name == "float8_e4m3fn":
            yield self._packed(f"{module}.weight", parts)
            yield self._scalar(f"{module}.weight_scale", first, "weights_scaling_factor")
            yield self._scalar(f"{module}.input_scale", first, "activation_scaling_factor")
        elif weight.spec.dtype.name == "int8":
            vector = self.vectors.get(module)
            if vector is not None and not vector.folded:
                yield self._vector(f"{module}.pre_quant_scale", vector)
            yield self._packed(f"{module}.weight", parts, rows=2, dtype=dtype_named("uint8"))
            yield self._packed(
                f"{module}.weight_scale", parts, columns=self.group_size, suffix="weights_scaling_factor"
            )
        else:
            yield self._packed(f"{module}.weight", parts, columns=2)
            yield self._packed(f"{module}.weight_scale", parts, columns=NVFP4_BLOCK, suffix="weights_scaling_factor")
            yield self._scalar(f"{module}.weight_scale_2", first, "weights_scaling_factor_2")
            yield self._scalar(f"{module}.input_scale", first, "activation_scaling_factor")

    def _plain(self, source: str, parts: list[Origin], fold: PreQuant | None) -> HfTensor:
        first = parts[0]
        blocks = cover(tuple(self._block(part, part.target.name) for part in parts), source, _matrix(first))
        times = Blocks(self._vector_blocks(fold)) if fold else None
        exact = len(first.piece.shape) == 1 and first.target.dtype == FLOAT32
        spec = TensorSpec(source, FLOAT32 if exact else self.dtype, first.piece.shape)
        return HfTensor(spec, Blocks(blocks, first.piece.transposed, first.plus_one, times))

    def _packed(
        self,
        name: str,
        parts: list[Origin],
        *,
        rows: int = 1,
        columns: int = 1,
        suffix: str = "weight",
        dtype: Dtype | None = None,
    ) -> HfTensor:
        """A matrix with one element for `rows` outputs and `columns` inputs; `dtype` overrides the stored dtype."""
        blocks = []
        for part in parts:
            base = part.target.name.removesuffix("weight")
            edges = (part.rows.start, part.rows.stop, part.first)
            if any(edge % rows for edge in edges) or part.cols.start % columns or part.cols.stop % columns:
                raise ForgeError(
                    f"{name}: a rank's part is not aligned to its packing of {rows} x {columns} weights",
                    hint=OF_THE_DIRECTORY,
                )
            packed = replace(
                part,
                rows=range(part.rows.start // rows, part.rows.stop // rows),
                cols=range(part.cols.start // columns, part.cols.stop // columns),
                first=part.first // rows,
            )
            blocks.append(self._block(packed, base + suffix))
        out, inputs = _matrix(parts[0])
        shape = (out // rows, inputs // columns)
        spec = TensorSpec(name, dtype or blocks[0].stored.spec.dtype, shape)
        return HfTensor(spec, Blocks(cover(tuple(blocks), name, shape)))

    def _column(self, name: str, parts: list[Origin]) -> HfTensor:
        """The scale of each output."""
        blocks = tuple(
            self._block(replace(part, cols=range(1)), part.target.name.removesuffix("weight") + "per_channel_scale")
            for part in parts
        )
        out = _matrix(parts[0])[0]
        return HfTensor(TensorSpec(name, FLOAT32, (out,)), Blocks(cover(blocks, name, (out, 1))))

    def _vector(self, name: str, vector: PreQuant) -> HfTensor:
        """A pre-quantisation scale, (in,)."""
        blocks = self._vector_blocks(vector)
        return HfTensor(TensorSpec(name, self.dtype, (blocks[-1].rows.stop,)), Blocks(blocks))

    def _vector_blocks(self, vector: PreQuant) -> tuple[Block, ...]:
        return tuple(
            Block(cols, range(1), self._of(rank, vector.target), 0) for rank, cols in sorted(vector.parts.items())
        )

    def _scalar(self, name: str, part: Origin, suffix: str) -> HfTensor:
        """The scaling factor of a matrix; for an expert's matrix, that expert's."""
        stored = self._of(part.rank, part.target.name.removesuffix("weight") + suffix)
        shape, count = self._of(part.rank, part.target.name).spec.shape, stored.spec.nbytes // stored.spec.dtype.size
        index = part.first // shape[1] if len(shape) == 3 and count > 1 else 0
        return HfTensor(TensorSpec(name, FLOAT32, ()), Scalar(stored, index))

    def _kv_scales(self) -> Iterator[HfTensor]:
        """A key scale and a value scale for each layer, both equal to the checkpoint's one scale of its KV cache.

        An unquantised model has no scales: its KV cache dtype is an LLM API argument, and TensorRT-LLM's scale is 1.
        """
        quantization = self.config.quantization
        if quantization.kv_cache_quant_algo is None or quantization.quant_algo is None:
            return
        attention = attention_module(self.family)
        tp = self.layout.parallel.tp
        for stage in range(self.layout.parallel.pp):
            for local, layer in enumerate(self.layout.parallel.layers_of(stage, self.facts.sizes.num_layers)):
                if layer in self.facts.sizes.linear_layers:
                    continue
                stored = self._of(stage * tp, f"transformer.layers.{local}.attention.kv_cache_scaling_factor")
                for name in ("k_proj.k_scale", "v_proj.v_scale"):
                    full = f"{self.family.layer_prefix}.{layer}.{attention}.{name}"
                    yield HfTensor(TensorSpec(full, FLOAT32, ()), Scalar(stored, 0))

    def _block(self, part: Origin, target: str) -> Block:
        return Block(part.rows, part.cols, self._of(part.rank, target), part.first)

    def _of(self, rank: int, target: str) -> StoredTensor:
        found = self.stored[rank].get(target)
        if found is None:
            raise ForgeError(f"rank {rank} of the checkpoint has no {target}", hint="Convert the model again.")
        return found


def _algorithm(packed: Sequence[TensorSpec]) -> str:
    """The algorithm of a linear layer in mixed precision, by its weight and scaling factors."""
    if any(spec.name.endswith(".weight_scale_2") for spec in packed):
        return "NVFP4"
    weight = next(spec for spec in packed if spec.name.endswith(".weight"))
    return "FP8" if weight.dtype.name == "float8_e4m3fn" else "W4A16_AWQ"


def _matrix(part: Origin) -> tuple[int, int]:
    """(out, in) of the whole source; a vector is one column."""
    rows, *others = part.piece.shape
    columns = prod(others)
    return (columns, rows) if part.piece.transposed else (rows, columns)


def _require_invertible(plan: CheckpointPlan) -> None:
    for target in plan.targets:
        if not isinstance(target.content, Cast):
            raise ForgeError(
                f"{target.spec.name} is a product of several tensors, which cannot be recovered from it",
                hint=OF_THE_DIRECTORY,
            )
