"""Tags that models write around calls of functions, as their chat templates teach them."""

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"  # Hermes, Qwen, GLM
JSON_TAGS = {
    TOOL_CALL: TOOL_CALL_END,
    "<|tool_call|>": "<|/tool_call|>",  # Phi-4-mini
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron
    "<tool_calls>": "</tool_calls>",  # Apriel, Jamba
    "<function_call>": "</function_call>",  # Granite 20B Functioncalling, without the closing tag
}
"""Those around the JSON of a call, or of an array of calls. Models may leave out the closing tag."""
FUNCTION, FUNCTION_END = "<function=", "</function>"  # Qwen3-Coder, Llama
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"  # MiniMax M2
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
