"""Tags that models write around calls of functions, as their chat templates teach them."""

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"  # Hermes, Qwen, GLM
LFM_CALLS, LFM_CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"  # LFM2, LFM2.5; Kimi K2 has the same end
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
JSON_TAGS = {
    TOOL_CALL: TOOL_CALL_END,
    "<|tool_call|>": "<|/tool_call|>",  # Phi-4-mini
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron
    "<tool_calls>": "</tool_calls>",  # Apriel, Jamba, MiniMax M1, Hunyuan A13B
    "<function_call>": "</function_call>",  # Granite 20B Functioncalling, without the closing tag
    LFM_CALLS: LFM_CALLS_END,  # LFM2, where it writes JSON
    ACTION: ACTION_END,  # Command R7B, Command A
    "Action: ```json": "```",  # Command R, Command R+
}
"""Those around the JSON of a call, or of an array of calls. Models may leave out the closing tag."""
FUNCTION, FUNCTION_END = "<function=", "</function>"  # Qwen3-Coder, Llama
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"  # MiniMax M2
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_CALLS, KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", LFM_CALLS_END
MINIMAX_CALLS, MINIMAX_CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
SEED_CALLS, SEED_CALLS_END = "<seed:tool_call>", "</seed:tool_call>"
PYTHON_CALLS, PYTHON_CALLS_END = "<|python_start|>", "<|python_end|>"  # Llama 4
OLMO_CALLS, OLMO_CALLS_END = "<function_calls>", "</function_calls>"  # Olmo 3
APERTUS_CALLS, APERTUS_CALLS_END = "<|tools_prefix|>", "<|tools_suffix|>"
DSML_CALLS = {"<｜DSML｜function_calls>": "</｜DSML｜function_calls>", "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>"}
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
    frozenset({GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE, GEMMA_CHANNEL, GEMMA_CHANNEL_END}),
    frozenset({XTML_OPEN, XTML_CLOSE, XTML_END}),
)
"""Groups of tags that are tokens of their own, and special ones in some tokenizers."""
TAGS = frozenset(
    {
        *JSON_TAGS,
        *JSON_TAGS.values(),
        FUNCTION_END,
        INVOKE_END,
        *(DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR),
        *(KIMI_CALLS, KIMI_CALLS_END, KIMI_CALL, KIMI_ARGUMENTS),
        *(MINIMAX_CALLS, MINIMAX_CALLS_END, SEED_CALLS, SEED_CALLS_END, OLMO_CALLS, OLMO_CALLS_END),
        *(APERTUS_CALLS, APERTUS_CALLS_END),
        *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    }
)
"""Tags that say alone what they mean. Those of Llama 4 add nothing to its calls, and are also around code."""
