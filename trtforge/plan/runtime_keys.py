"""The config.pbtxt keys that features set in addition to build flags, as the Triton backend spells them.

Source: triton_backend/inflight_batcher_llm/src/model_instance_state.cc, and docs/model_config.md of the backend.
"""

from dataclasses import dataclass

from trtforge.core.features import Choices, FeaturesConfig


@dataclass(frozen=True)
class RuntimeKey:
    """A parameter of the `tensorrt_llm` model, and the feature that sets it."""

    key: str
    value: str
    feature: str


def runtime_keys(features: FeaturesConfig) -> tuple[RuntimeKey, ...]:
    """The keys that the features set, except KV reuse and chunked context; `features.lora` is resolved.

    An adapter of the largest rank fills one page of the cache. Draft tokens sent by the client need no key.
    """
    keys: list[RuntimeKey] = []
    lora, look = features.lora, features.lookahead
    if lora is not None:
        rank = str(lora.max_rank)
        keys += [
            RuntimeKey("lora_cache_optimal_adapter_size", rank, "lora"),
            RuntimeKey("lora_cache_max_adapter_size", rank, "lora"),
            RuntimeKey("lora_cache_gpu_memory_fraction", str(lora.gpu_fraction), "lora"),
            RuntimeKey("lora_cache_host_memory_bytes", str(lora.host_memory), "lora"),
        ]
    if features.medusa is not None:
        keys += _tree("medusa", features.medusa.choices)
    if features.eagle is not None:
        keys += _tree("eagle", features.eagle.choices)
    if look is not None:
        sizes = {"window_size": look.window, "ngram_size": look.ngram, "verification_set_size": look.verification}
        keys.append(RuntimeKey("decoding_mode", "lookahead", "lookahead"))
        keys += [RuntimeKey(f"lookahead_{name}", str(size), "lookahead") for name, size in sizes.items()]
    if features.weights_on_gpu < 1:
        keys.append(RuntimeKey("gpu_weights_percent", str(features.weights_on_gpu), "weights_on_gpu"))
    return tuple(keys)


def _tree(method: str, choices: Choices | None) -> list[RuntimeKey]:
    """The decoding mode and the tree as the backend parses it; without choices TensorRT-LLM uses its default tree.

    Multi-block attention, on by default, does not support trees (tensorrt_llm/runtime/model_runner_cpp.py).
    """
    keys = [RuntimeKey("decoding_mode", method, method), RuntimeKey("multi_block_mode", "false", method)]
    if choices is not None:
        tree = ", ".join("{" + ", ".join(map(str, path)) + "}" for path in choices)
        keys.append(RuntimeKey(f"{method}_choices", tree, method))
    return keys
