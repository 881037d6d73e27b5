"""Time estimates by a roofline: a step takes as long as its arithmetic or its memory traffic, whichever is longer.

These are estimates. A matrix product is bound by the tensor cores (prefill) or by reading the weights (decode),
attention in decode by reading the KV cache, tensor parallelism by two all-reduces a layer. The efficiencies below are
assumptions, fitted to the throughput that NVIDIA publishes for TensorRT-LLM 1.0: 120 points of Llama 8B, 70B and 405B
in FP8 and FP4 on H100, H200, B200 and RTX PRO 6000 (docs/source/performance/perf-overview.md), all within a factor of
1.7, 64 % within 15 %. Latency at small batches, other GPUs and other formats have not been validated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trtforge.core.parallel import Parallel
from trtforge.models.family import Facts
from trtforge.plan.formats import Compute
from trtforge.plan.gpus import GPUS_PER_SERVER, Gpu
from trtforge.plan.kv import bytes_per_token, cached_layers, is_latent
from trtforge.plan.memory import Held
from trtforge.plan.weights import Matrix

COMPUTE_EFFICIENCY: Mapping[Compute, float] = MappingProxyType({"float16": 0.6, "int8": 0.55, "fp8": 0.55, "fp4": 0.35})
"""Share of the tensor cores' dense rate that matrix products of a full step reach."""

UNPACKING_EFFICIENCY = 0.8
"""Additional factor for kernels that dequantise weights before they multiply (4-bit and weight-only formats)."""

ATTENTION_EFFICIENCY = 0.5
"""Share of the dense rate that attention over the prompt reaches."""

BANDWIDTH_EFFICIENCY = 0.7
"""Share of the memory bandwidth at which weights are read."""

CACHE_EFFICIENCY = 0.75
"""Share of the memory bandwidth at which the KV cache is read."""

LINK_EFFICIENCY = 0.5
"""Share of a link's rate that an all-reduce reaches."""

ALL_REDUCE_SECONDS = 10e-6
"""Latency of an all-reduce of any size."""

NETWORK_BYTES_PER_SECOND = 50e9
"""Between servers: InfiniBand NDR, 400 Gbit/s a GPU."""

STEP_SECONDS = 1e-3
"""Scheduling, launching and sampling of a step."""

REQUEST_SECONDS = 3e-6
"""Added to a step for each running request."""

STAGE_LOSS = 0.05
"""Share by which each further pipeline stage lengthens a step, as stages wait for one another."""


@dataclass(frozen=True)
class Workload:
    """A typical request: tokens of its prompt and of its answer."""

    prompt: int
    output: int

    @property
    def length(self) -> int:
        """Tokens in the KV cache at its end."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Performance:
    """Estimates for a number of concurrent requests; times in seconds."""

    concurrency: int
    ttft: float
    tpot: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, of all requests."""
        return self.concurrency / self.tpot

    def request_seconds(self, workload: Workload) -> float:
        """Seconds from a request's arrival to its last token."""
        return self.ttft + self.tpot * max(0, workload.output - 1)


@dataclass(frozen=True)
class Roofline:
    """The time model of a legal deployment on GPUs of one kind."""

    facts: Facts
    held: Held
    parallel: Parallel
    gpu: Gpu
    max_num_tokens: int

    def performance(self, concurrency: int, workload: Workload) -> Performance:
        """Steady state of `concurrency` requests: each step generates a token for each and processes new prompts.

        Pipeline stages run concurrently, each on its share of the requests.
        """
        share = concurrency / self.parallel.pp
        prompts = share * workload.prompt / workload.output
        stages = self.parallel.pp
        slowest = max(self.step_seconds(stage, share, prompts, workload) for stage in range(stages))
        step = stages * slowest * (1 + STAGE_LOSS * (stages - 1))
        return Performance(concurrency, ttft=self.prefill_seconds(workload) + step / 2, tpot=step)

    def prefill_seconds(self, workload: Workload) -> float:
        """A prompt on an idle server, in chunks of at most max_num_tokens, through all stages."""
        chunks = -(-workload.prompt // self.max_num_tokens)
        chunk = workload.prompt / chunks
        return chunks * sum(self.step_seconds(stage, 0, chunk, workload) for stage in range(self.parallel.pp))

    def step_seconds(self, stage: int, requests: float, prompt_tokens: float, workload: Workload) -> float:
        """One step of one stage: a token for each of `requests`, and `prompt_tokens` of prompts."""
        tokens = requests + prompt_tokens
        seconds = STEP_SECONDS / self.parallel.pp + REQUEST_SECONDS * requests
        for block, count in self.held.ranks.blocks(self.parallel, stage):
            of_block = sum(self._matrix_seconds(matrix, tokens, requests) for matrix in block.matrices)
            seconds += count * of_block
        seconds += self._attention_seconds(requests, prompt_tokens, workload)
        return seconds + self._communication_seconds(tokens)

    def _matrix_seconds(self, matrix: Matrix, tokens: float, requests: float) -> float:
        """One matrix product. The LM head has one row a request: a prompt needs the logits of its last token only."""
        rows = max(1.0, requests) if matrix.head else tokens
        used, weights = 1.0, float(matrix.weights)
        if matrix.expert:
            share = int(self.facts.config["moe"]["top_k"]) / self.facts.sizes.of("experts")
            used = 1 - (1 - share) ** tokens
            weights *= share
        format = matrix.own or self.held.stored.format
        kind: Compute = format.compute if matrix.formatted else "float16"
        efficiency = COMPUTE_EFFICIENCY[kind]
        if matrix.formatted and format.unpacked:
            efficiency *= UNPACKING_EFFICIENCY
        arithmetic = 2 * rows * weights / (self.gpu.rate(kind) * efficiency)
        reading = used * matrix.nbytes(self.held.stored) / (self.gpu.bandwidth * BANDWIDTH_EFFICIENCY)
        return max(arithmetic, reading)

    def _attention_seconds(self, requests: float, prompt_tokens: float, workload: Workload) -> float:
        sizes, layers = self.facts.sizes, cached_layers(self.facts.sizes, self.parallel)
        query = (sizes.of("q_b") if is_latent(sizes) else sizes.of("q")) / self.parallel.tp
        scores = 4 * query * prompt_tokens * workload.prompt / 2  # q kᵀ and its product with v, half of it masked
        arithmetic = layers * scores / (self.gpu.float16 * ATTENTION_EFFICIENCY)
        held = requests * (workload.prompt + workload.output / 2)
        per_token = bytes_per_token(sizes, self.held.cache_itemsize, self.parallel)
        return arithmetic + held * per_token / (self.gpu.bandwidth * CACHE_EFFICIENCY)

    def _communication_seconds(self, tokens: float) -> float:
        """Ring all-reduces after attention and MLP, and sending the hidden state to the next stage."""
        message = tokens * self.facts.sizes.hidden * self.held.stored.itemsize
        seconds, tp = 0.0, self.parallel.tp
        if tp > 1:
            one = ALL_REDUCE_SECONDS + 2 * (tp - 1) / tp * message / (self._link(tp) * LINK_EFFICIENCY)
            seconds += 2 * one * (self.facts.sizes.num_layers // self.parallel.pp)
        if self.parallel.pp > 1:
            seconds += ALL_REDUCE_SECONDS + message / (self._link(self.parallel.world_size) * LINK_EFFICIENCY)
        return seconds

    def _link(self, gpus: int) -> float:
        """Bytes/s between `gpus` GPUs."""
        links = self.gpu.links
        beyond = gpus > max(GPUS_PER_SERVER, links.nvlink_gpus)
        return min(links.pcie, NETWORK_BYTES_PER_SECOND) if beyond else links.among(gpus)
