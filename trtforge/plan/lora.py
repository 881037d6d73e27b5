"""Memory of LoRA adapters: what one takes, the caches on GPU and host that hold them, and the plugin's workspace.

Sources: sizes of modules: cpp/tensorrt_llm/runtime/loraModule.cpp; pages of the caches and how much must fit:
`getPageManagerConfig` in cpp/tensorrt_llm/batch_manager/peftCacheManager.cpp; workspace: `getLowRankWorkSpaceSize` in
cpp/tensorrt_llm/kernels/lora/lora.cpp.
"""

from trtforge.core.features import LoraFeature, LoraModule
from trtforge.core.parallel import Parallel
from trtforge.models.family import Sizes

_QKV_MODULES = 3


def module_values(sizes: Sizes, parallel: Parallel, module: LoraModule) -> int:
    """Values of a module's two matrices on one rank, for a rank of 1: its inputs and its outputs.

    Of a column-parallel layer the outputs are cut, of a row-parallel one the inputs.
    """
    tp, hidden = parallel.tp, sizes.hidden
    queries = sizes.num_heads * sizes.head_size // tp
    keys = max(1, sizes.num_kv_heads // tp) * sizes.head_size
    match module:
        case "attn_qkv":
            return hidden + queries + 2 * keys
        case "attn_q":
            return hidden + queries
        case "attn_k" | "attn_v":
            return hidden + keys
        case "attn_dense":
            return hidden // tp + hidden
        case "mlp_h_to_4h" | "mlp_gate" | "mlp_4h_to_h":
            return hidden + sizes.intermediate // tp


def adapter_bytes(sizes: Sizes, parallel: Parallel, lora: LoraFeature, itemsize: int) -> int:
    """Bytes of an adapter of the largest rank on one GPU, and as many on its host: what either cache must hold.

    rank x sum(inputs + outputs) x layers of the stage, in whole rows of the cache: rows are as wide as the smallest
    module. `lora` is resolved.
    """
    assert lora.max_rank is not None
    assert lora.modules
    values = [module_values(sizes, parallel, module) for module in lora.modules]
    layers = sizes.num_layers // parallel.pp
    width = min(values)
    rows = -(-lora.max_rank * sum(values) * layers // width)
    return rows * width * itemsize


def workspace_bytes(lora: LoraFeature, tokens: int, itemsize: int) -> int:
    """The plugin's buffer between the two matrices in a step of `tokens`: query, key and value are one plugin."""
    assert lora.max_rank is not None
    modules = _QKV_MODULES if "attn_q" in lora.modules else 1
    return -(-tokens * modules * lora.max_rank * itemsize // 16) * 16


def cache_bytes(lora: LoraFeature, left: int) -> int:
    """The GPU's adapter cache, out of the bytes that are left when engine and KV pool are there."""
    return int(max(0, left) * lora.gpu_fraction)
