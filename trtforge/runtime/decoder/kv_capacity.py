"""The number of KV blocks of a rank, limited by the memory that is free after the weights are loaded."""

import torch

from trtforge.core.config_model import Config
from trtforge.core.device import CPU_CACHE_BYTES
from trtforge.core.errors import ForgeError
from trtforge.formats.attention_windows import fitting_blocks
from trtforge.machine.host import Host
from trtforge.machine.memory import read_memory
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.scheduling.batch_limits import BatchLimits


class KvMemory(Config):
    """Memory for the KV cache of each rank: a fraction of the free memory, at most for `tokens` if given.

    `host_bytes`: additional bytes for blocks in host memory. `windows`: give sliding-window layers separate blocks if
    other layers attend to all tokens, so that they keep only what is within their windows.
    """

    fraction: float = 0.9
    tokens: int | None = None
    host_bytes: int = 0
    windows: bool = False


def block_bytes(spec: DecoderSpec, dtype: torch.dtype, tokens_per_block: int) -> int:
    """Bytes of one KV block over the layers of one rank."""
    return spec.cached_layers * _layer_bytes(spec, dtype, tokens_per_block)


def window_block_bytes(spec: DecoderSpec, dtype: torch.dtype, tokens_per_block: int) -> int:
    """Bytes of one KV block over the sliding-window layers of one rank."""
    return sum(layer.window is not None for layer in spec.layers) * _layer_bytes(spec, dtype, tokens_per_block)


def _layer_bytes(spec: DecoderSpec, dtype: torch.dtype, tokens_per_block: int) -> int:
    size = dtype.itemsize if spec.kv_format == "none" else 1
    vectors, elements = spec.cached
    return tokens_per_block * vectors * elements * size


def states_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of a sequence's states in the linear attention layers of one rank."""
    each = 0 if spec.linear is None else spec.linear.state_bytes(dtype.itemsize)
    return (spec.num_layers - spec.cached_layers) * each


def block_count(
    spec: DecoderSpec,
    place: Placement,
    limits: BatchLimits,
    tokens_per_block: int,
    fraction: float,
    tokens: int | None,
    reserved: int = 0,
    drafter: int = 0,
    window_blocks: int = 0,
) -> int:
    """KV blocks of one rank: for `tokens`, or for a full batch if None, within `fraction` of the free memory.

    `reserved`: bytes that each rank needs for other purposes; `drafter`: bytes of a block in the drafters' layers;
    `window_blocks`: separate blocks of sliding-window layers, used if the other layers get more; otherwise all layers
    have the same number. Raises ForgeError if not even one block fits.
    """
    on_cpu = place.device.type == "cpu"
    reserved += limits.max_batch_size * states_bytes(spec, place.dtype)
    available = max(0, free_memory(place.device) - reserved * (spec.tp * spec.pp if on_cpu else 1)) * fraction
    if on_cpu:
        available = (available if tokens is not None else min(available, CPU_CACHE_BYTES)) / (spec.tp * spec.pp)
    each = block_bytes(spec, place.dtype, tokens_per_block) + drafter
    windowed = window_block_bytes(spec, place.dtype, tokens_per_block)
    fitting = fitting_blocks(int(available), each, windowed, window_blocks)
    useful = limits.max_batch_size * -(-limits.max_seq_len // tokens_per_block)
    wanted = useful if tokens is None else tokens // tokens_per_block
    if min(fitting, wanted) < 1:
        beside = (
            f" beside {reserved:,} bytes for steps, adapters, drafters, prompt tables and states" if reserved else ""
        )
        raise ForgeError(
            f"the KV cache has no room for one block of {tokens_per_block} tokens{beside}",
            hint="Free some memory, or raise kv_cache_fraction or kv_cache_tokens. For adapters, an engine keeps "
            "engine.features.lora.host_memory; for steps on a GPU, less with a smaller engine.max_num_tokens.",
        )
    return min(fitting, wanted)


def host_block_count(memory: int, block: int, ranks: int, taken: int) -> int:
    """KV blocks of `block` bytes that fit in `memory` bytes of host memory; each of the `ranks` takes `memory` bytes.

    `taken`: bytes of the same memory that each rank needs for other purposes. Raises ForgeError if `memory` is not
    free, is negative or has no room for a block.
    """
    if not memory:
        return 0
    if memory < 0:
        raise ForgeError(f"kv_cache_host_memory_bytes is {memory:,}", hint="Give at least 0 bytes, or leave it out.")
    if memory < block:
        raise ForgeError(
            f"kv_cache_host_memory_bytes is {memory:,}, less than the {block:,} bytes of a rank's KV block",
            hint="Give bytes for many blocks, or leave it out.",
        )
    free = max(0, free_memory(torch.device("cpu")) - taken * ranks)
    if memory * ranks > free:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ForgeError(
            f"kv_cache_host_memory_bytes is {memory:,}{each}, but only {free:,} bytes of host memory are free",
            hint="Lower it, or free some memory.",
        )
    return memory // block


def free_memory(device: torch.device, host: Host | None = None) -> int:
    """Free bytes on `device`; for a CPU, of `host` (None: this machine) within its control group.

    Raises ForgeError if that is unknown.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that loading took and freed counts as free
        return torch.cuda.mem_get_info(device)[0]
    memory = read_memory(host or Host())
    if memory is None:
        raise ForgeError("free memory is unknown: /proc/meminfo cannot be read", hint="Mount /proc for this process.")
    return memory.available
