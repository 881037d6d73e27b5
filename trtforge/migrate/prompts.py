"""The longest prompt of an engine that ignores its max_input_len."""

from collections.abc import Mapping
from typing import Any

_PACKED = ("build_config.plugin_config.remove_input_padding", "build_config.plugin_config.context_fmha")
WHY = (
    "TensorRT-LLM ignores it with remove_input_padding and context_fmha, only max_seq_len and max_num_tokens limit "
    "prompts: max_input_len is {} now, lower it to refuse longer prompts"
)


def ignores_max_input_len(engine: Mapping[str, Any]) -> bool:
    """Whether TensorRT-LLM ignores the engine's max_input_len (tensorrt_llm/builder.py, 1.2).

    `engine`: config.json by dotted key. The embedded engine, which writes `forge.` keys, enforces it.
    """
    return all(engine.get(key) is True for key in _PACKED) and not any(key.startswith("forge.") for key in engine)


def longest_prompt(values: Mapping[str, Any]) -> int | None:
    """Tokens of the longest prompt: max_seq_len - 1, without chunked prefill at most max_num_tokens; None without
    max_seq_len.

    `values`: the LLM API's arguments by dotted key.
    """
    if "max_seq_len" not in values:
        return None
    longest = max(int(values["max_seq_len"]) - 1, 1)
    limit = None if values.get("enable_chunked_prefill") else values.get("max_num_tokens")
    return longest if limit is None else min(longest, int(limit))
