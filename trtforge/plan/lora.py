"""Memory of LoRA adapters: one adapter, the caches on GPU and host, and the plugin's workspace.

Sources: sizes of modules: cpp/tensorrt_llm/runtime/loraModule.cpp; pages of the caches and how much must fit:
`getPageManagerConfig` in cpp/tensorrt_llm/batch_manager/peftCacheManager.cpp; workspace: `getLowRankWorkSpaceSize` in
cpp/tensorrt_llm/kernels/lora/lora.cpp.
"""

from trtforge.core.features import LoraFeature, LoraModule
from trtforge.core.parallel import Parallel
from trtforge.models.family import Family, Sizes

_QKV_MODULES = 3


def module_values(sizes: Sizes, parallel: Parallel, module: LoraModule) -> int:
    """Values of a module's two matrices on one GPU at LoRA rank 1: its inputs plus its outputs.

    Column-parallel layers split the outputs, row-parallel layers the inputs.
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


def matrices_bytes(sizes: Sizes, parallel: Parallel, lora: LoraFeature, itemsize: int) -> int:
    """Bytes of the matrices of an adapter of the largest rank on one GPU: rank x sum(inputs + outputs) x layers.

    `lora` is resolved.
    """
    assert lora.max_rank is not None
    values = sum(module_values(sizes, parallel, module) for module in lora.modules)
    return lora.max_rank * values * (sizes.num_layers // parallel.pp) * itemsize


def embedded_bytes(family: Family, sizes: Sizes, parallel: Parallel, lora: LoraFeature, itemsize: int) -> int:
    """Bytes of an adapter of the largest rank on one rank of the embedded engine.

    `matrices_bytes` follows TensorRT-LLM: attn_dense has as many inputs as the hidden size, whatever the heads are, and
    mlp_h_to_4h as many outputs as the intermediate size, even if it is up and gate (Phi-3).
    """
    assert lora.max_rank is not None
    more = 0
    if "attn_dense" in lora.modules:
        more += (sizes.of("q") - sizes.hidden) // parallel.tp
    if "mlp_h_to_4h" in lora.modules and any(row.target == "mlp.fc" and len(row.parts) == 2 for row in family.linears):
        more += sizes.intermediate // parallel.tp
    layers = sizes.num_layers // parallel.pp
    return matrices_bytes(sizes, parallel, lora, itemsize) + lora.max_rank * more * layers * itemsize


def adapter_bytes(sizes: Sizes, parallel: Parallel, lora: LoraFeature, itemsize: int) -> int:
    """Bytes that TensorRT-LLM's caches of the GPU and the host must each hold for one adapter of the largest rank.

    `matrices_bytes`, rounded up to cache rows, which are as wide as the smallest module.
    """
    width = min(module_values(sizes, parallel, module) for module in lora.modules) * itemsize
    return -(-matrices_bytes(sizes, parallel, lora, itemsize) // width) * width


def workspace_bytes(lora: LoraFeature, tokens: int, itemsize: int) -> int:
    """Bytes of the plugin's buffer between both matrices in a step of `tokens`; query, key and value share a plugin."""
    assert lora.max_rank is not None
    modules = _QKV_MODULES if "attn_q" in lora.modules else 1
    return -(-tokens * modules * lora.max_rank * itemsize // 16) * 16


def cache_bytes(lora: LoraFeature, left: int) -> int:
    """Bytes of the GPU's adapter cache; `left`: bytes that engine and KV pool leave."""
    return int(max(0, left) * lora.gpu_fraction)
