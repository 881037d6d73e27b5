"""Memory of the embedded engine (backend torch): weights as its kernels pack them, and the usable KV pool.

Unlike TensorRT-LLM, it keeps weights in the compute dtype unless a kernel takes packed weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from trtforge.core.device import CPU_CACHE_BYTES, UsableDevice
from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.parallel import Parallel
from trtforge.formats.attention_windows import fitting_blocks
from trtforge.machine.processor import Processor, compute_dtype
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.kernels import (
    KEPT,
    PACKED_GROUPS,
    TRITON_SM,
    Kept,
    KernelName,
    kernel_for,
    kernel_of_size,
    plain_kernel,
    screen_bytes,
)
from trtforge.plan.budget import other_formats
from trtforge.plan.drafting import Target
from trtforge.plan.embedded_drafting import embedded_drafter, with_served_draft
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.kv import blocks_of, bytes_per_token, cached_layers
from trtforge.plan.limits import EngineLimits
from trtforge.plan.memory import Memory, RankMemory
from trtforge.plan.model import Model
from trtforge.plan.request import Request
from trtforge.plan.weights import Matrix, RankWeights


@dataclass(frozen=True)
class Embedded:
    """How the embedded engine computes.

    Kernels: `kernel` of quantised linear layers, `fp8` of those in FP8 in mixed precision, `plain` of unquantised ones.
    `screens`: whether the tokens of large LM heads are screened.
    """

    device: UsableDevice
    compute_dtype: ModelDtype
    kernel: KernelName
    fp8: KernelName = "fp8_dense"
    plain: KernelName = "dense"
    screens: bool = False

    @classmethod
    def of(cls, request: Request, processor: Processor) -> "Embedded":
        """The choice of `trtforge compile`; `device: auto` is a GPU if the request names one, else the CPU."""
        device = request.engine.device
        if device == "auto":
            device = "cpu" if request.gpu is None else "cuda"
        dtype = compute_dtype(request.engine.compute_dtype, request.dtype, device, processor)
        name = WEIGHTS[request.quant].name
        native, sm = processor.kernels, TRITON_SM if request.gpu is None else request.gpu.sm
        choose = partial(kernel_for, vnni=processor.vnni, native=native, sm=sm)
        plain = plain_kernel(request.dtype, device, dtype, native=native)
        return cls(
            device,
            dtype,
            choose(name, request.group_size, device, dtype, int8_activations=request.engine.int8_activations),
            choose("fp8", request.group_size, device, dtype),
            plain,
            screens=device == "cpu" and native and (dtype == "bfloat16" or plain == "plain_native_cpu"),
        )

    def as_json(self) -> dict[str, str]:
        """Device, dtype and the kernel of the quantised linear layers."""
        return {"device": self.device, "compute_dtype": self.compute_dtype, "kernel": self.kernel}

    def memory(self, model: Model, request: Request, layout: Layout, planned: Memory, limits: EngineLimits) -> Memory:
        """`planned` with the weights and the KV bytes of this engine."""
        parallel, sizes = layout.parallel, model.facts.sizes
        whole = model.whole(self.compute_dtype, layout.exclude_modules)
        ranks = model.weights(replace(layout, dtype=self.compute_dtype))
        cache = CACHES[request.kv_cache]
        itemsize = cache.itemsize or dtype_named(self.compute_dtype).size
        target = Target(model.facts, ranks, parallel, limits, dtype_named(self.compute_dtype).size, itemsize)
        features = with_served_draft(request.engine.features, request.serving)
        beside = embedded_drafter(features, request.draft, target, self.device, self._draft)
        scales = cache.per_layer * cached_layers(sizes, parallel)
        per_token, windows = bytes_per_token(sizes, itemsize, parallel), planned.windows
        table = request.engine.features.max_prompt_embedding_table_size * sizes.hidden * target.itemsize
        lora = request.engine.features.lora
        sliding = [0 if windows is None else windows.own_layers(stage) for stage in range(parallel.pp)]
        stages = tuple(
            replace(
                rank,
                weights=self._weights(ranks, request, parallel, stage) + scales,
                kv_per_token=per_token + beside.kv_per_token,
                window_per_token=per_token // cached_layers(sizes, parallel) * sliding[stage],
                draft=beside.weights,
                lora=0 if lora is None else lora.host_memory,  # adapters that come with requests, up to this
                tables=0 if stage else table,  # on the ranks with the embedding
            )
            for stage, rank in enumerate(planned.stages)
        )
        return replace(
            planned,
            weights=self._weights(whole, request, Parallel(), 0) + cache.per_layer * cached_layers(sizes, Parallel()),
            kv_per_token=bytes_per_token(sizes, itemsize),
            stages=stages,
        )

    def pool_tokens(self, request: Request, memory: Memory, limits: EngineLimits) -> tuple[int, int]:
        """Tokens of the KV pool, of all layers and of layers with windows.

        Enough for all requests at full length, or serving.kv_cache_tokens, limited to the tokens that fit.
        """
        block, most = limits.tokens_per_block, request.serving.kv_cache_tokens
        own = 0  # separate blocks of layers with windows
        if memory.windows is not None:
            own = memory.windows.own_blocks(block, limits.max_batch_size, limits.max_num_tokens)
        wanted = limits.max_batch_size * blocks_of(limits.max_seq_len, block) if most is None else most // block
        if self.device == "cuda" and request.gpu is not None:
            gpu, fraction = int(request.gpu.memory), request.serving.kv_cache_fraction
            rooms = ((int((gpu - rank.fixed) * fraction), rank) for rank in memory.stages)
            wanted = min(wanted, *(_fitting(room, rank, own, block) for room, rank in rooms))
        if self.device == "cpu" and most is None:
            share = CPU_CACHE_BYTES // memory.parallel.world_size
            wanted = min(wanted, *(_fitting(share, rank, own, block) for rank in memory.stages))
        return wanted * block, (own if 0 < own < wanted else wanted) * block

    def _weights(self, weights: RankWeights, request: Request, parallel: Parallel, stage: int) -> int:
        return _total(weights, parallel, stage, lambda matrix: self._matrix(matrix, request))

    def _kept(self, format: str, matrix: Matrix, group: int) -> Kept:
        name = {"none": self.plain, "fp8": self.fp8}.get(format, self.kernel)
        return KEPT[kernel_of_size(name, matrix.out, matrix.inputs, group)]

    def _unquantised(self, matrix: Matrix) -> int:
        if matrix.absorbed:  # both phases use its two factors
            return 0
        if matrix.exact:
            return matrix.weights * matrix.itemsize
        kept = self._kept("none", matrix, 1)
        screen = screen_bytes(matrix.out, matrix.inputs) if matrix.head and self.screens else 0
        return matrix.count * kept.nbytes(matrix.out, matrix.inputs, self.compute_dtype, 1, prescaled=False) + screen

    def _draft(self, weights: RankWeights) -> int:
        """Bytes of the weights of a draft model that is not quantised, on one rank."""
        return _total(weights, Parallel(), 0, self._unquantised)

    def _matrix(self, matrix: Matrix, request: Request) -> int:
        if not matrix.formatted:
            return self._unquantised(matrix)
        format, group = matrix.own or WEIGHTS[request.quant], request.group_size
        if format.name == "int4_wo":  # a row's scale, repeated for a group size that the kernels support
            group = next((size for size in PACKED_GROUPS if matrix.inputs % size == 0), matrix.inputs)
        prescaled = format.per_input_elements > 0
        kept = self._kept(format.name if matrix.own else request.quant, matrix, group)
        known = matrix.count * kept.nbytes(matrix.out, matrix.inputs, self.compute_dtype, group, prescaled=prescaled)
        if request.bits is None:
            return known
        others = other_formats(request.bits, request.group_size)
        return ceil(others * max(known, matrix.weights * matrix.itemsize) + (1 - others) * known)


def _fitting(room: int, rank: RankMemory, window_blocks: int, block: int) -> int:
    """KV blocks of `block` tokens of a rank in `room` bytes: see `fitting_blocks`."""
    return fitting_blocks(room, rank.kv_per_token * block, rank.window_per_token * block, window_blocks)


def _total(weights: RankWeights, parallel: Parallel, stage: int, size: Callable[[Matrix], int]) -> int:
    return sum(
        count * (block.other + sum(map(size, block.matrices))) for block, count in weights.blocks(parallel, stage)
    )
