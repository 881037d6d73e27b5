"""Host memory for KV blocks, `serving.kv_cache_host_memory_bytes`: whether a block fits, and whether the machine has
it.

TensorRT-LLM rounds down (`blocksInSecondaryPool` in batch_manager/kvCacheManager.cpp): with less than a block it
silently keeps no blocks on the host. The embedded engine then does not start.
"""

from collections.abc import Iterator

from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.models.checkpoint_sizes import sizes_of
from trtforge.models.family import Sizes
from trtforge.models.registry import family_of_engine
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.formats import CACHE_BY_ALGORITHM, CACHES
from trtforge.plan.kv import bytes_per_token
from trtforge.plan.legality import Problem


def too_small(given: int, block: int) -> Iterator[Problem]:
    """The problem of `given` bytes of host memory that are fewer than the `block` bytes of a block."""
    if given < block:
        message = f"serving.kv_cache_host_memory_bytes is {given:,}, less than the {block:,} bytes of a rank's KV block"
        yield Problem("serving", message, "Give bytes for many blocks, or leave it out of serving.")


def block_of_engine(model: CheckpointConfig, dtype: ModelDtype, tokens_per_block: int) -> int:
    """Bytes of a KV block on one rank of an engine that computes in `dtype`.

    0 if unknown from its config.json: latent attention, and networks of unknown families.
    """
    if "kv_lora_rank" in (model.model_extra or {}) or family_of_engine(model.base_architecture) is None:
        return 0
    cache = CACHE_BY_ALGORITHM.get(model.quantization.kv_cache_quant_algo)
    itemsize = 0 if cache is None else cache.itemsize or dtype_named(dtype).size
    return bytes_per_token(sizes_of(model), itemsize, model.parallel) * tokens_per_block


def host_block_problems(evaluation: Evaluation, sizes: Sizes, host: Host | None = None) -> Iterator[Problem]:
    """Problems of host memory that is smaller than one rank's KV block (without a drafter's layers) or larger than the
    host's.

    More than `host` (None: this machine) has is only a warning, as another machine may serve. On the CPU, weights and
    KV cache of the embedded engine are in the same memory.
    """
    request, memory, limits = evaluation.request, evaluation.memory, evaluation.limits
    given = request.serving.kv_cache_host_memory_bytes
    if given is None or memory is None or limits is None:
        return
    embedded = evaluation.embedded
    dtype = request.dtype if embedded is None else embedded.compute_dtype
    itemsize = CACHES[request.kv_cache].itemsize or dtype_named(dtype).size
    block = bytes_per_token(sizes, itemsize, memory.parallel) * limits.tokens_per_block
    yield from too_small(given, block)
    there = read_memory(host or Host()) if embedded is not None else None
    if embedded is None or there is None:
        return
    beside = sum(map(memory.over_all, ("weights", "kv_pool", "lora"))) if embedded.device == "cpu" else 0
    needed = given * memory.parallel.world_size + beside
    if needed > there.most:
        message = (
            f"serving.kv_cache_host_memory_bytes: the engine then needs {needed:,} bytes of host memory, this "
            f"machine has {there.most:,}"
        )
        yield Problem("serving", message, "Lower it, or serve on a machine with more.", refuses=False)
