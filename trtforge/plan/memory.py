"""GPU memory of every rank while it serves: weights, KV pool, activations, logits and runtime.

Weights and KV bytes are exact. The rest bounds what TensorRT-LLM allocates for the largest step of the build, and is
checked against the logs of TensorRT-LLM issues #1188 and #3636 and of tensorrtllm_backend issue #625.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtforge.core.parallel import Parallel
from trtforge.models.family import Facts
from trtforge.models.linear_attention import state_bytes
from trtforge.plan.formats import CacheFormat
from trtforge.plan.kv import bytes_per_token, cached_layers, is_latent, pool_tokens, requests_that_fit
from trtforge.plan.limits import EngineLimits
from trtforge.plan.weights import RankWeights, Stored
from trtforge.plan.windows import CacheWindows

_MIB, _GIB = 1 << 20, 1 << 30
RUNTIME_BYTES = int(1.6 * _GIB)
"""CUDA contexts, TensorRT and Triton: 11.77 GiB before the KV pool, less 10.15 accounted for (backend issue #625)."""

COMMUNICATION_BYTES = 512 * _MIB
"""NCCL and custom all-reduce buffers of each of several ranks (#3058)."""

WORKSPACE_BYTES = 32 * _MIB
"""cuBLAS workspace: 43.26 MiB of execution context at 512 tokens, less 11.5 of activations (#1188)."""

DECODER_LOGITS = 6.3
"""Buffers of runtime and decoder, as a multiple of the logits: 8.42 GiB with the 1.16 GiB of logits (#1188)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the GPU of a rank of one pipeline stage. `decoder`: sampling buffers that grow with the logits.

    `window_per_token`: the part of `kv_per_token` in layers with windows that have separate blocks. `state`: of linear
    attention, for a full batch. `lora`: adapters and their workspace. `draft`: draft model or heads, and the logits of
    draft tokens. `tables`: prompt tables of a full batch. `streamed`: weights kept in host memory instead; `host`: all
    of the rank's host memory.
    """

    weights: int
    activations: int
    logits: int
    decoder: int
    runtime: int
    kv_per_token: int
    kv_pool: int = 0
    window_per_token: int = 0
    state: int = 0
    lora: int = 0
    draft: int = 0
    tables: int = 0
    streamed: int = 0
    host: int = 0

    @property
    def fixed(self) -> int:
        """Bytes without the KV pool."""
        working = self.activations + self.logits + self.decoder + self.runtime
        return self.weights + working + self.state + self.lora + self.draft + self.tables

    @property
    def total(self) -> int:
        """Bytes with the KV pool."""
        return self.fixed + self.kv_pool


@dataclass(frozen=True)
class Memory:
    """Bytes of a deployment. `weights` and `kv_per_token`: of the unsplit model; `stages`: of a rank of each stage.

    `windows`: sliding windows behind which the backend frees blocks; None: every layer keeps all tokens.
    """

    weights: int
    kv_per_token: int
    kv_tokens: int
    stages: tuple[RankMemory, ...]
    parallel: Parallel
    windows: CacheWindows | None = None

    def requests(self, length: int, tokens_per_block: int) -> int:
        """Requests of `length` tokens, prompt and answer, that fit the KV pool at once."""
        if self.windows is None:
            return requests_that_fit(self.kv_tokens, length, tokens_per_block)
        return self.windows.requests(self.kv_tokens, length, tokens_per_block)

    def longest(self, tokens_per_block: int) -> int:
        """Tokens of the longest sequence that fits the KV pool."""
        return self.kv_tokens if self.windows is None else self.windows.longest(self.kv_tokens, tokens_per_block)

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs the most memory."""
        return max(self.stages, key=lambda rank: rank.total)

    def over_all(self, name: str) -> int:
        """One kind of bytes, summed over all GPUs."""
        return self.parallel.tp * sum(int(getattr(rank, name)) for rank in self.stages)

    def as_json(self) -> Mapping[str, Any]:
        """In bytes: `per_gpu` is the total of the fullest GPU, `gpu` its parts; the rest are sums over all GPUs.

        total = weights + replicated - streamed + kv_pool + activations + logits + decoder + runtime + lora + draft, and
        `state` of models with linear attention. `host` is host memory, not part of the total.
        """
        gpu = self.fullest
        parts = ["weights", "kv_per_token", "kv_pool", "activations", "logits", "decoder", "runtime", "lora", "draft"]
        parts += ["state"] if gpu.state else []
        offloaded = ("streamed", "host")
        return {
            "weights": self.weights,
            "kv_per_token": self.kv_per_token,
            "kv_pool": self.over_all("kv_pool"),
            "activations": self.over_all("activations"),
            "total": self.over_all("total"),
            "per_gpu": gpu.total,
            "replicated": self.over_all("weights") + self.over_all("streamed") - self.weights,
            **{name: self.over_all(name) for name in (*parts[4:], *offloaded)},
            "gpu": {name: getattr(gpu, name) for name in (*parts, *offloaded)},
        }


@dataclass(frozen=True)
class Held:
    """The weights of the ranks and of the unsplit model, how they are stored, and the KV cache format.

    `vision`: bytes of a multimodal model's vision part. Each GPU is assumed to have all of it: TensorRT-LLM splits its
    matrices, but not its embeddings (_torch/models/modeling_siglip.py, modeling_pixtral.py).
    """

    ranks: RankWeights
    whole: RankWeights
    stored: Stored
    cache: CacheFormat
    vision: int = 0

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a value in the KV cache."""
        return self.cache.itemsize or self.stored.itemsize


def memory_of(facts: Facts, held: Held, parallel: Parallel, limits: EngineLimits) -> Memory:
    """The memory of a legal layout without a KV pool, which `with_pool` adds."""
    itemsize, layers = held.cache_itemsize, cached_layers(facts.sizes, Parallel())
    stages = tuple(_rank(facts, held, parallel, limits, stage) for stage in range(parallel.pp))
    return Memory(
        weights=held.whole.nbytes(held.stored, Parallel(), 0) + held.cache.per_layer * layers + held.vision,
        kv_per_token=bytes_per_token(facts.sizes, itemsize),
        kv_tokens=0,
        stages=stages,
        parallel=parallel,
    )


def with_pool(memory: Memory, tokens: int, window_tokens: int | None = None) -> Memory:
    """`memory` with a KV pool of `tokens`; of `window_tokens` in layers with windows that have separate blocks."""
    spared = 0 if window_tokens is None else tokens - window_tokens
    stages = tuple(
        replace(rank, kv_pool=tokens * rank.kv_per_token - spared * rank.window_per_token) for rank in memory.stages
    )
    return replace(memory, kv_tokens=tokens, stages=stages)


def tokens_on(memory: Memory, gpu_memory: int, fraction: float, tokens_per_block: int) -> int:
    """Tokens of the KV pool if each rank gives it `fraction` of its free memory: the minimum over the ranks."""
    return min(
        pool_tokens(int((gpu_memory - rank.fixed) * fraction), rank.kv_per_token, tokens_per_block)
        for rank in memory.stages
    )


def activation_bytes(facts: Facts, parallel: Parallel, itemsize: int, tokens: int) -> int:
    """Upper bound of the activations of a step of `tokens`: one layer's, as TensorRT reuses memory between layers.

    The residual twice, plus the widest of: queries, keys, values and attention output; both halves of the gated MLP;
    the tokens' copies for their experts.
    """
    sizes, tp = facts.sizes, parallel.tp
    if is_latent(sizes):
        attention = sizes.of("q_lora") + sizes.of("kv_a") + sizes.total(("q_b", "k_nope", "v_mla", "v_mla")) // tp
    else:
        heads = 2 * sizes.num_heads // tp + 2 * max(1, sizes.num_kv_heads // tp)
        attention = heads * sizes.head_size
    widest = max(attention, 2 * sizes.intermediate // tp)
    if facts.sparse_layers:
        top_k = int(facts.config["moe"]["top_k"])
        inner = 2 * sizes.of("moe_intermediate") * parallel.ep // tp
        shared = 2 * sizes.more.get("shared_intermediate", 0) // tp
        widest = max(widest, top_k * (sizes.hidden + inner) + shared)
    return tokens * itemsize * (2 * sizes.hidden + widest)


def logits_bytes(vocab: int, sequences: int) -> int:
    """The float32 logits of a step: one row for each sequence that generates."""
    return sequences * vocab * 4


def _rank(facts: Facts, held: Held, parallel: Parallel, limits: EngineLimits, stage: int) -> RankMemory:
    itemsize, vocab, last = held.stored.itemsize, facts.sizes.vocab, stage == parallel.pp - 1
    sequences = limits.max_batch_size * limits.max_beam_width
    logits = logits_bytes(vocab, sequences) if last else 0
    head = sequences * -(-vocab // parallel.tp) * itemsize if last else 0
    layers = cached_layers(facts.sizes, parallel)
    return RankMemory(
        weights=held.ranks.nbytes(held.stored, parallel, stage) + held.cache.per_layer * layers + held.vision,
        activations=activation_bytes(facts, parallel, itemsize, limits.max_num_tokens) + head + WORKSPACE_BYTES,
        logits=logits,
        decoder=int(DECODER_LOGITS * logits),
        runtime=RUNTIME_BYTES + (COMMUNICATION_BYTES if parallel.world_size > 1 else 0),
        kv_per_token=bytes_per_token(facts.sizes, held.cache_itemsize, parallel),
        state=limits.max_batch_size * state_bytes(facts.sizes, itemsize, parallel, stage),
    )
