"""Tokens that divide answers of Mistral's models into thoughts, text and calls, and that their tokenizers call special.

Source: mistral_common/tokens/tokenizers/instruct.py, 1.13. Of tokenizers up to version 7 an array of calls follows
`CALLS`; of later ones a name, `ARGUMENTS` and these, in version 11 with `CALL_ID` and an id before `ARGUMENTS`.
"""

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK, THINK_END = "[THINK]", "[/THINK]"
TOKENS = frozenset({CALLS, CALL_ID, ARGUMENTS, THINK, THINK_END})
