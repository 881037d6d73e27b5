"""Host memory for KV blocks, `serving.kv_cache_host_memory_bytes`: whether it holds a block, and whether it is there.

TensorRT-LLM rounds down (`blocksInSecondaryPool` in batch_manager/kvCacheManager.cpp): with less than a block it keeps
none on the host and says nothing. The embedded engine does not start.
"""

from collections.abc import Iterator

from trtforge.core.dtypes import dtype_named
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.models.family import Sizes
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.formats import CACHES
from trtforge.plan.kv import bytes_per_token
from trtforge.plan.legality import Problem


def host_block_problems(evaluation: Evaluation, sizes: Sizes, host: Host | None = None) -> Iterator[Problem]:
    """Memory of less than a block of a rank, without the layers that a drafter adds, which no server can use.

    A warning, as another machine may serve: more than this machine (None), or `host`, has. On the CPU weights and cache
    of the embedded engine are in the same memory.
    """
    request, memory, limits = evaluation.request, evaluation.memory, evaluation.limits
    given = request.serving.kv_cache_host_memory_bytes
    if given is None or memory is None or limits is None:
        return
    embedded = evaluation.embedded
    dtype = request.dtype if embedded is None else embedded.compute_dtype
    itemsize = CACHES[request.kv_cache].itemsize or dtype_named(dtype).size
    block = bytes_per_token(sizes, itemsize, memory.parallel) * limits.tokens_per_block
    if given < block:
        message = f"serving.kv_cache_host_memory_bytes is {given:,}, a KV block of a rank has {block:,} bytes"
        yield Problem("serving", message, "Give it room for many blocks, or leave it out of serving.")
    there = read_memory(host or Host()) if embedded is not None else None
    if embedded is None or there is None:
        return
    beside = memory.over_all("weights") + memory.over_all("kv_pool") if embedded.device == "cpu" else 0
    needed = given * memory.parallel.world_size + beside
    if needed > there.most:
        message = (
            f"serving.kv_cache_host_memory_bytes: with it the engine takes {needed:,} bytes of host memory, this "
            f"machine has {there.most:,}"
        )
        yield Problem("serving", message, "Lower it, or serve on a machine with more.", refuses=False)
