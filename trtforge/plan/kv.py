"""The KV cache: bytes per token, and how many tokens, hence requests, fit a pool.

Formula and rounding are those of TensorRT-LLM's KV cache manager (batch_manager/kvCacheManager.cpp), and reproduce the
logs of TensorRT-LLM issues #1188, #1400, #2268 and #2894.
"""

from trtforge.core.parallel import Parallel
from trtforge.models.family import Sizes


def is_latent(sizes: Sizes) -> bool:
    """Whether the cache contains multi-head latent attention's compressed vector instead of keys and values."""
    return "kv_lora" in sizes.more


def bytes_per_token(sizes: Sizes, itemsize: int, parallel: Parallel | None = None) -> int:
    """Bytes of one token in the KV cache of one rank, over its layers; without `parallel`, of the unsplit model.

    Keys and values of the rank's KV heads (one if there are fewer heads than ranks). The latent vector is replicated on
    every tensor-parallel rank. If the numbers of layers with a cache differ between pipeline stages, the largest number
    counts.
    """
    parallel = parallel or Parallel()
    layers = cached_layers(sizes, parallel)
    if is_latent(sizes):
        return layers * sizes.head_size * itemsize
    return 2 * layers * max(1, sizes.num_kv_heads // parallel.tp) * sizes.head_size * itemsize


def cached_layers(sizes: Sizes, parallel: Parallel) -> int:
    """The largest number of layers with a KV cache in a pipeline stage; linear attention has none."""
    stages = (parallel.layers_of(stage, sizes.num_layers) for stage in range(parallel.pp))
    return max(len(layers) - len(sizes.linear_layers.intersection(layers)) for layers in stages)


def pool_tokens(pool: int, per_token: int, tokens_per_block: int) -> int:
    """Tokens that fit `pool` bytes. As the cache manager does, the last block is rounded up."""
    return blocks_of(max(0, pool) // per_token, tokens_per_block) * tokens_per_block


def blocks_of(tokens: int, tokens_per_block: int) -> int:
    """Number of KV blocks of a sequence of `tokens`."""
    return -(-tokens // tokens_per_block)


def requests_that_fit(tokens: int, length: int, tokens_per_block: int) -> int:
    """Requests of `length` tokens, prompt and answer, that fit a pool of `tokens` at once."""
    return tokens // (blocks_of(length, tokens_per_block) * tokens_per_block)
