"""The formats in which models write function calls, as taught by their chat templates.

Sources of the later ones, beside vLLM's parsers (vllm/tool_parsers/{lfm2,cohere_command,deepseekv32,deepseekv4,gemma4}_
tool_parser.py): the templates of LFM2.5-8B-A1B, c4ai-command-r7b-12-2024, DeepSeek-V3.2, gemma-4-31B-it and Kimi-K3 in
llama.cpp (models/templates); for Command R the template server/testdata/tools/command-r-plus.gotmpl of ollama. For
lists in Python's notation, calls on separate lines and Apertus: {pythonic,llama4_pythonic,olmo3}_tool_parser.py of vLLM
and the template of Apertus-8B-Instruct.

An answer may also be JSON: an array of objects with `name` and `arguments` or `parameters`, or begin with such objects
(Llama 3.1); or a list in Python's notation (Llama 3.2 and 4).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trtforge.core import call_tags, harmony, mistral_tokens
from trtforge.core.call_tags import (
    APERTUS_CALLS,
    APERTUS_CALLS_END,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    DSML_CALLS,
    DSML_INVOKE,
    DSML_INVOKE_END,
    DSML_PARAMETER,
    DSML_PARAMETER_END,
    FUNCTION,
    FUNCTION_END,
    GEMMA_CALL,
    GEMMA_CALL_END,
    GEMMA_QUOTE,
    INVOKE,
    INVOKE_END,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_CALLS,
    KIMI_CALLS_END,
    LFM_CALLS,
    LFM_CALLS_END,
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    OLMO_CALLS,
    OLMO_CALLS_END,
    PYTHON_CALLS,
    PYTHON_CALLS_END,
    RECIPIENT,
    SEED_CALLS,
    SEED_CALLS_END,
    TOOL_CALL,
    TOOL_CALL_END,
    XTML_CALL,
    XTML_CALLS,
    XTML_CALLS_END,
    XTML_CLOSE,
    XTML_END,
    XTML_OPEN,
)

_NO_CODE = f"{PYTHON_CALLS}{PYTHON_CALLS_END}"
JSON_TAGS = {
    **call_tags.JSON_TAGS,
    mistral_tokens.CALLS: "",
    _NO_CODE: "",  # Llama 4: its template shows an answer without text so
    PYTHON_CALLS: PYTHON_CALLS_END,
}
"""Opening to closing tag around the JSON of a call or of an array of calls; "": the end of the answer."""
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
"""What the JSON of a call names the function and its arguments."""
_BLANK = r"\s{0,99}"
_NAME = r"(?P<name>[A-Za-z0-9_-]{1,64})"
_TYPE = rf'(?:"type"{_BLANK}:{_BLANK}"function"{_BLANK},{_BLANK})?'
_ID = rf'(?:"tool_call_id"{_BLANK}:{_BLANK}"[^"\\]{{0,64}}"{_BLANK},{_BLANK})?'  # Command R7B, Command A
_HEAD = (
    rf'\{{{_BLANK}(?:{_TYPE}|{_ID})"(?:{"|".join(NAMES)})"{_BLANK}:{_BLANK}"{_NAME}"{_BLANK},{_BLANK}'
    rf'"(?:{"|".join(ARGUMENTS)})"{_BLANK}:{_BLANK}(?=\{{)'
)
"""A call up to its arguments, of bounded length, so that a long text is not searched again for each token."""
FIRST = re.compile(rf"{_BLANK}(?P<mark>\[?){_BLANK}{_HEAD}")
NEXT = re.compile(rf"{_BLANK}(?P<mark>[,;]?){_BLANK}{_HEAD}")
OBJECT = re.compile(r"\s*(?=\{)")
"""Text before an object that is not in an array."""
ANOTHER = re.compile(rf"{_BLANK};?{_BLANK}(?=\{{)")
"""Text before another such object, after a call."""
ANOTHER_SO_FAR = re.compile(rf"{_BLANK};?{_BLANK}")
"""Text that `ANOTHER` may match if an object follows."""
ELEMENT = re.compile(rf"{_BLANK},?{_BLANK}(?=\{{)")
"""Text before an object in an array that does not begin like a call."""
_OBJECT = r'(?=\{\s{0,99}["}])'
BARE = re.compile(rf"{_BLANK}(?:{RECIPIENT})?{_NAME}\n?{_OBJECT}")
"""A name with its arguments: a call of functionary 3.2, or in Mistral's format if its special tokens have no text."""
NAME_SO_FAR = re.compile(rf"{_BLANK}>{{0,3}}(?P<name>[A-Za-z0-9_-]{{0,64}})(?P<whole>\n?\{{{_BLANK}|\n)?")
LONGEST_HEAD = 1000
_XTML_CALL_END = f"{XTML_CLOSE}call{XTML_END}"
_XTML_ARGUMENT, _XTML_ARGUMENT_END = f'{XTML_OPEN}argument key="', f"{XTML_CLOSE}argument{XTML_END}"


@dataclass(frozen=True)
class ParameterTags:
    """The notation of one argument: `head`: everything up to its value; `end`: the text after it.

    `head` may have a group `string`, with which the value is a string. `begins_with`: the beginning of every head;
    `ends`: the texts that `end` matches, the first of which ends a value; `lines`: the value is on separate lines, so
    the line feed before its end does not belong to it.
    """

    head: re.Pattern[str]
    begins_with: str
    end: re.Pattern[str]
    ends: tuple[str, ...]
    lines: bool = False


@dataclass(frozen=True)
class LiteralNotation:
    """The notation of arguments in literals: names, each with a value, up to `end`.

    `assigns`: the character between name and value; within values it is a colon. `opens`: brackets that open values.
    `quotes`: those of strings, the longest first; `escapes`: strings have Python's escape sequences.
    """

    assigns: str
    end: str
    opens: str
    quotes: tuple[str, ...]
    escapes: bool = False


@dataclass(frozen=True)
class CallForm:
    """A call between tags.

    `head`: everything up to the arguments; `closing`: tags that may follow them, in this order; `tags`, `literals`: the
    notation of arguments that are not JSON; `several`: further calls may follow, on separate lines if `lines`;
    `in_object`: the arguments are the last value of a JSON object; `in_array`: that object is the first of an array;
    `keyed`: the name is the key of the arguments; `end`: text that ends the arguments even within a string.
    """

    head: re.Pattern[str]
    closing: Sequence[str]
    tags: ParameterTags | None = None
    literals: LiteralNotation | None = None
    several: bool = False
    lines: bool = False
    in_object: bool = False
    in_array: bool = False
    keyed: bool = False
    end: str = ""


_QWEN3_CODER = ParameterTags(
    re.compile(rf"{_BLANK}<parameter=(?P<name>[^<>]{{1,256}})>(?:\n|(?=[^\n]))"),
    begins_with="<parameter=",
    end=re.compile(r"</parameter>|(?=\n<parameter=|\n</function>)"),
    ends=("</parameter>", "\n</parameter>", "\n<parameter=", "\n</function>"),
    lines=True,
)
_GLM = ParameterTags(
    re.compile(rf"{_BLANK}<arg_key>(?P<name>[^<>]{{1,256}})</arg_key>{_BLANK}<arg_value>"),
    begins_with="<arg_key>",
    end=re.compile("</arg_value>"),
    ends=("</arg_value>",),
)

_MINIMAX = ParameterTags(
    re.compile(rf'{_BLANK}<parameter name="(?P<name>[^<>]{{1,256}})">'),
    begins_with='<parameter name="',
    end=re.compile("</parameter>"),
    ends=("</parameter>",),
)
_DSML = ParameterTags(
    re.compile(
        rf'{_BLANK}{DSML_PARAMETER}(?P<name>[^<>"]{{1,256}})"(?:{_BLANK}string="(?:(?P<string>true)|false)")?{_BLANK}>'
    ),
    begins_with=DSML_PARAMETER,
    end=re.compile(DSML_PARAMETER_END),
    ends=(DSML_PARAMETER_END,),
)
_XTML = ParameterTags(
    re.compile(
        rf'{_BLANK}{re.escape(_XTML_ARGUMENT)}(?P<name>[^<>"]{{1,256}})"'
        rf'(?: type="(?:(?P<string>string)|[a-z]{{1,20}})")?{re.escape(XTML_END)}'
    ),
    begins_with=_XTML_ARGUMENT,
    end=re.compile(re.escape(_XTML_ARGUMENT_END)),
    ends=(_XTML_ARGUMENT_END,),
)
_PYTHON = LiteralNotation("=", ")", "{[(", ('"""', "'''", '"', "'"), escapes=True)
_GEMMA = LiteralNotation(":", "}", "{[", (GEMMA_QUOTE,))
LIST = re.compile(rf"{_BLANK}\[{_BLANK}{_NAME}\(")
"""A list of calls in Python's notation, up to the first one's arguments."""
_FURTHER = rf"{_BLANK}(?P<name>[\w.-]{{1,64}})\("
_FURTHER_SO_FAR = rf"{_BLANK}[\w.-]{{0,64}}"
FURTHER = re.compile(rf"{_BLANK},{_FURTHER}")
"""Text between a call in Python's notation and the arguments of the next one in the list."""
FURTHER_SO_FAR = re.compile(rf"{_BLANK}(?:,{_FURTHER_SO_FAR})?")
FURTHER_LINE = re.compile(rf"{_BLANK},?{_FURTHER}")
"""The same for calls on separate lines."""
FURTHER_LINE_SO_FAR = re.compile(rf"{_BLANK}(?:,?{_FURTHER_SO_FAR})?")
KEYED = re.compile(rf'{_BLANK},{_BLANK}\{{{_BLANK}"{_NAME}"{_BLANK}:{_BLANK}(?=\{{)')
"""Text between an object with a call, whose key is the function's name, and the arguments of the next one."""
KEYED_SO_FAR = re.compile(rf'{_BLANK}(?:,{_BLANK}(?:\{{{_BLANK}(?:"[A-Za-z0-9_-]{{0,64}}"?{_BLANK}:?{_BLANK})?)?)?')

TAGGED = (
    *(  # Hermes, Qwen 2.5 and 3, other JSON tags; Mistral's older models
        CallForm(re.compile(rf"{re.escape(begin)}{_BLANK}{_HEAD}"), (end,) if end else (), in_object=True)
        for begin, end in JSON_TAGS.items()
    ),
    *(
        CallForm(
            re.compile(rf"{re.escape(begin)}{_BLANK}\[{_BLANK}{_HEAD}"),
            ("]", end) if end else ("]",),
            in_object=True,
            in_array=True,
        )
        for begin, end in JSON_TAGS.items()
    ),
    CallForm(  # Qwen3-Coder, Seed-OSS
        re.compile(rf"(?:(?:{TOOL_CALL}|{SEED_CALLS}){_BLANK})?{FUNCTION}{_NAME}>{_BLANK}(?=<)"),
        (FUNCTION_END, TOOL_CALL_END, SEED_CALLS_END),
        _QWEN3_CODER,
    ),
    CallForm(re.compile(rf"{FUNCTION}{_NAME}>{_BLANK}{_OBJECT}"), (FUNCTION_END,)),  # Llama 3.1's own functions
    CallForm(re.compile(rf"{TOOL_CALL}{_BLANK}{_NAME}{_BLANK}(?=<)"), (TOOL_CALL_END,), _GLM),  # GLM 4.5 to 4.7
    CallForm(  # DeepSeek V3, R1
        re.compile(
            rf"(?:{DEEPSEEK_CALLS}{_BLANK})?{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{_NAME}\n```json\n{_BLANK}{_OBJECT}"
        ),
        ("```", DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END),
    ),
    CallForm(  # DeepSeek V3.1
        re.compile(rf"(?:{DEEPSEEK_CALLS}{_BLANK})?{DEEPSEEK_CALL}{_NAME}{DEEPSEEK_SEPARATOR}{_BLANK}{_OBJECT}"),
        (DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END),
    ),
    CallForm(  # Kimi K2
        re.compile(
            rf"(?:{re.escape(KIMI_CALLS)}{_BLANK})?{re.escape(KIMI_CALL)}{_BLANK}(?:functions\.)?{_NAME}"
            rf"(?::{_BLANK}\d{{1,9}})?{_BLANK}{re.escape(KIMI_ARGUMENTS)}{_BLANK}{_OBJECT}"
        ),
        (KIMI_CALL_END, KIMI_CALLS_END),
    ),
    CallForm(  # Mistral
        re.compile(
            rf"{re.escape(mistral_tokens.CALLS)}{_BLANK}{_NAME}(?:{re.escape(mistral_tokens.CALL_ID)}\w{{1,64}})?"
            rf"(?:{re.escape(mistral_tokens.ARGUMENTS)})?{_BLANK}{_OBJECT}"
        ),
        (),
    ),
    CallForm(  # MiniMax M2
        re.compile(rf'(?:{MINIMAX_CALLS}{_BLANK})?{INVOKE}{_NAME}">{_BLANK}(?=<)'),
        (INVOKE_END, MINIMAX_CALLS_END),
        _MINIMAX,
    ),
    CallForm(  # DeepSeek V3.2, V4
        re.compile(rf'(?:(?:{"|".join(DSML_CALLS)}){_BLANK})?{DSML_INVOKE}{_NAME}"{_BLANK}>{_BLANK}(?=<)'),
        (DSML_INVOKE_END, *DSML_CALLS.values()),
        _DSML,
    ),
    CallForm(  # Kimi K3
        re.compile(
            rf"(?:{re.escape(XTML_CALLS)}{_BLANK})?{re.escape(XTML_CALL)}{_NAME}\""
            rf'(?: index="\d{{1,9}}")?{re.escape(XTML_END)}{_BLANK}(?=<)'
        ),
        (_XTML_CALL_END, XTML_CALLS_END),
        _XTML,
    ),
    CallForm(  # LFM2
        re.compile(rf"{re.escape(LFM_CALLS)}{_BLANK}\[?{_BLANK}{_NAME}\("),
        ("]", LFM_CALLS_END),
        literals=_PYTHON,
        several=True,
    ),
    CallForm(  # Llama 4
        re.compile(rf"{re.escape(PYTHON_CALLS)}{_BLANK}\[{_BLANK}{_NAME}\("),
        ("]", PYTHON_CALLS_END),
        literals=_PYTHON,
        several=True,
    ),
    CallForm(  # Olmo 3
        re.compile(rf"{OLMO_CALLS}{_BLANK}{_NAME}\("), (OLMO_CALLS_END,), literals=_PYTHON, several=True, lines=True
    ),
    CallForm(  # Apertus
        re.compile(rf'{re.escape(APERTUS_CALLS)}{_BLANK}\[{_BLANK}\{{{_BLANK}"{_NAME}"{_BLANK}:{_BLANK}(?=\{{)'),
        ("]", APERTUS_CALLS_END),
        in_object=True,
        in_array=True,
        keyed=True,
    ),
    CallForm(  # Gemma 4
        re.compile(rf"{re.escape(GEMMA_CALL)}{_BLANK}call:{_BLANK}{_NAME}\{{"), (GEMMA_CALL_END,), literals=_GEMMA
    ),
    CallForm(  # gpt-oss, in the output of `HarmonyText`
        re.compile(rf"{re.escape(harmony.CALL_HEAD)}{_NAME}{re.escape(harmony.MESSAGE)}{_BLANK}(?=\{{)"),
        (harmony.CALL,),
        end=harmony.CALL,
    ),
)
MARKS = (
    *JSON_TAGS,
    FUNCTION,
    INVOKE,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALL,
    KIMI_CALLS,
    KIMI_CALL,
    MINIMAX_CALLS,
    SEED_CALLS,
    *DSML_CALLS,
    DSML_INVOKE,
    OLMO_CALLS,
    APERTUS_CALLS,
    GEMMA_CALL,
    XTML_CALLS,
    XTML_CALL,
    harmony.CALL_HEAD,
)
"""The beginnings of the formats."""
MARK = re.compile("|".join(map(re.escape, MARKS)))
JSON_BEGINS = re.compile(rf"{_BLANK}[{{[]")
"""Begins the JSON after a tag."""
_SOME_NAME = r"(?P<name>[A-Za-z0-9_-]{0,64})"
_KIMI_SO_FAR = re.compile(
    rf"{_BLANK}(?:{re.escape(KIMI_CALL)}{_BLANK})?[\w.-]{{0,99}}{_BLANK}(?::[\s\d]{{0,99}})?(?s:<.*)?"
)
_TAG_SO_FAR = re.compile(rf"{_BLANK}(?s:<.*)?")
SO_FAR = {
    **dict.fromkeys(JSON_TAGS, re.compile(_BLANK)),
    TOOL_CALL: re.compile(rf"{_BLANK}(?:(?s:[{{<].*)|{_SOME_NAME}(?P<whole>{_BLANK}(?s:<.*)?))"),
    mistral_tokens.CALLS: re.compile(rf"{_BLANK}{_SOME_NAME}(?P<whole>(?s:\[.*)|{_BLANK}(?:\{{{_BLANK})?)"),
    LFM_CALLS: re.compile(rf"{_BLANK}{_SOME_NAME}(?P<whole>\()?"),
    PYTHON_CALLS: re.compile(rf"{_BLANK}|<[|a-z_]{{0,13}}"),
    OLMO_CALLS: re.compile(rf"{_BLANK}{_SOME_NAME}(?P<whole>\()?"),
    APERTUS_CALLS: re.compile(
        rf'{_BLANK}(?:\[{_BLANK}(?:\{{{_BLANK}(?:"{_SOME_NAME}(?P<whole>"{_BLANK}(?::{_BLANK})?)?)?)?)?'
    ),
    FUNCTION: re.compile(rf"{_SOME_NAME}(?P<whole>>{_BLANK}(?:\{{{_BLANK})?)?"),
    INVOKE: re.compile(rf'{_SOME_NAME}(?P<whole>"|">{_BLANK})?'),
    DSML_INVOKE: re.compile(rf'{_SOME_NAME}(?P<whole>"{_BLANK}(?:>{_BLANK})?)?'),
    XTML_CALL: re.compile(rf'{_SOME_NAME}(?P<whole>"(?: [^<]{{0,40}})?(?s:<.*)?)?'),
    GEMMA_CALL: re.compile(rf"{_BLANK}(?:c|ca|cal|call|call:{_BLANK}{_SOME_NAME}(?P<whole>\{{)?)?"),
    **dict.fromkeys((KIMI_CALLS, KIMI_CALL), _KIMI_SO_FAR),
    **dict.fromkeys((MINIMAX_CALLS, SEED_CALLS, XTML_CALLS, *DSML_CALLS), _TAG_SO_FAR),
    harmony.CALL_HEAD: re.compile(rf"{_SOME_NAME}(?P<whole>(?s:<.*))?"),
}
"""By mark, the text that may follow before the head of a call is complete; any text for other marks."""
