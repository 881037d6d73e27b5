"""Tags that models write around calls of functions, as their chat templates teach them."""

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"  # Hermes, Qwen, GLM
LFM_CALLS, LFM_CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"  # LFM2, LFM2.5; Kimi K2 has the same end
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
JSON_TAGS = {
    TOOL_CALL: TOOL_CALL_END,
    "<|tool_call|>": "<|/tool_call|>",  # Phi-4-mini
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron
    "<tool_calls>": "</tool_calls>",  # Apriel, Jamba
    "<function_call>": "</function_call>",  # Granite 20B Functioncalling, without the closing tag
    LFM_CALLS: LFM_CALLS_END,  # LFM2, where it writes JSON
    ACTION: ACTION_END,  # Command R7B, Command A
    "Action: ```json": "```",  # Command R, Command R+
}
"""Those around the JSON of a call, or of an array of calls. Models may leave out the closing tag."""
FUNCTION, FUNCTION_END = "<function=", "</function>"  # Qwen3-Coder, Llama
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"  # MiniMax M2
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", LFM_CALLS_END
DSML_INVOKE, DSML_INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"  # DeepSeek V3.2
DSML_PARAMETER, DSML_PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
RECIPIENT = ">>>"  # functionary 3.2
GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_CHANNEL, GEMMA_CHANNEL_END = "<|channel>", "<channel|>"
COHERE_THINKING, COHERE_THINKING_END = "<|START_THINKING|>", "<|END_THINKING|>"
XTML_OPEN, XTML_CLOSE, XTML_END = "<|open|>", "<|close|>", "<|sep|>"  # Kimi K3
XTML_CALL = f'{XTML_OPEN}call tool="'
XTML_CALLS, XTML_CALLS_END = f"{XTML_OPEN}tools{XTML_END}", f"{XTML_CLOSE}tools{XTML_END}"
XTML_THINK, XTML_THINK_END = f"{XTML_OPEN}think{XTML_END}", f"{XTML_CLOSE}think{XTML_END}"
XTML_RESPONSE, XTML_RESPONSE_END = f"{XTML_OPEN}response{XTML_END}", f"{XTML_CLOSE}response{XTML_END}"
TOKENS = (
    frozenset({LFM_CALLS, LFM_CALLS_END}),
    frozenset({ACTION, ACTION_END, COHERE_THINKING, COHERE_THINKING_END}),
    frozenset({GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE, GEMMA_CHANNEL, GEMMA_CHANNEL_END}),
    frozenset({XTML_OPEN, XTML_CLOSE, XTML_END}),
)
"""Groups of tags that are tokens of their own, and special ones in some tokenizers."""
