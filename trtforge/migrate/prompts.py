"""The longest prompt that an engine takes, where that is not the max_input_len it was built with."""

from collections.abc import Mapping
from typing import Any

_PACKED = ("build_config.plugin_config.remove_input_padding", "build_config.plugin_config.context_fmha")
WHY = (
    "TensorRT-LLM ignores it with remove_input_padding and context_fmha, a prompt ends with max_seq_len or "
    "max_num_tokens: max_input_len is {} now, lower it if longer prompts shall be refused"
)


def ignores_max_input_len(engine: Mapping[str, Any]) -> bool:
    """Whether TensorRT-LLM takes no notice of the engine's max_input_len (tensorrt_llm/builder.py, 1.2).

    `engine`: config.json by dotted key. The embedded engine, which writes `forge.` keys, does keep to it.
    """
    return all(engine.get(key) is True for key in _PACKED) and not any(key.startswith("forge.") for key in engine)


def longest_prompt(values: Mapping[str, Any]) -> int | None:
    """Tokens: one less than a sequence, and no more than a step where prompts are not cut; None without max_seq_len.

    `values`: the LLM API's arguments by dotted key.
    """
    if "max_seq_len" not in values:
        return None
    longest = max(int(values["max_seq_len"]) - 1, 1)
    step = None if values.get("enable_chunked_prefill") else values.get("max_num_tokens")
    return longest if step is None else min(longest, int(step))
