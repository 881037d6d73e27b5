"""Several calls between two tags, calls without arguments, and calls in Python's notation: Llama 4, Olmo 3, Apertus."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway.test_call_forms import GRANITE, RAIN_JSON, REORDERED, ROME, ROME_JSON, TIME, TIME_JSON, USE, array
from tests.gateway.test_later_call_forms import CountingReader, cut
from tests.gateway.test_tools import AUTO, streams_as_a_whole
from trtforge.core.call_json import calls_in
from trtforge.core.shown_calls import is_known_call
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.call_reader import CallReader
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, split
from trtforge.gateway.tools import ToolUse

NO_ARGUMENTS, NULL = '{"name": "time"}', '{"name": "time", "arguments": null}'
TEXT = r'{"name": "weather", "arguments": "{\"city\": \"Rome\", \"days\": 3}"}'


def tagged(*calls: str) -> str:
    """Calls one after another between two tags, as MiniMax M1 writes them."""
    return "\n".join(["<tool_calls>", *calls, "</tool_calls>"])


LIST = "[weather(city='Rome', days=3), time()]"
LLAMA_4 = f"<|python_start|>{LIST}<|python_end|>"
LLAMA_4_JSON = f"<|python_start|><|python_end|>{ROME_JSON}{TIME_JSON}"
OLMO = '<function_calls>\nweather(city="Rome", days=3)\ntime()\n</function_calls>'
APERTUS = '<|tools_prefix|>[{"weather": {"city": "Rome", "days": 3}}, {"time": {}}]<|tools_suffix|>'
ALL = [
    tagged(ROME_JSON, TIME_JSON),
    tagged(ROME_JSON, NO_ARGUMENTS),
    tagged(ROME_JSON, REORDERED),
    tagged(TEXT, NULL),
    f"<tool_call>{ROME_JSON};{NO_ARGUMENTS}</tool_call>",
    f"<tool_call>{TEXT}</tool_call><tool_call>{NO_ARGUMENTS}</tool_call>",
    array(ROME_JSON, NO_ARGUMENTS),
    array(TEXT, '{"name": "time", "parameters": ""}'),
    LLAMA_4,
    LLAMA_4_JSON,
    f"<|python_start|>[{ROME_JSON}, {NO_ARGUMENTS}]<|python_end|>",
    OLMO,
    OLMO.replace("\n", ""),
    OLMO.replace(")\nt", "), t"),
    APERTUS,
]


@pytest.mark.parametrize("text", ALL)
def test_calls_are_recognised_whole_and_in_pieces(text: str) -> None:
    for before, after in (("", ""), ("I ask.\n", " So.")):
        if after and not text.endswith(">"):
            after = ""
        written = f"{before}{text}{after}"
        assert split(USE, written, "stop") == (f"{before}{after}" if after else before.strip(), [ROME, TIME])
        for size in (1, 2, 7):
            assert streams_as_a_whole(USE, written, [size] * len(written), "stop") == [ROME, TIME]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"<tool_call>{NO_ARGUMENTS}</tool_call>", "", [TIME]),
        (f"<tool_call>\n{NULL}\n</tool_call>", "", [TIME]),
        (f"<tool_call>{NO_ARGUMENTS}", "", [TIME]),
        (f"[TOOL_CALLS]{NO_ARGUMENTS}", "", [TIME]),
        (tagged(NO_ARGUMENTS, ROME_JSON), "", [TIME, ROME]),
        (tagged(ROME_JSON, '{"a": 1}'), '\n{"a": 1}\n</tool_calls>', [ROME]),
        (tagged(ROME_JSON, RAIN_JSON, TIME_JSON), f"\n{RAIN_JSON}\n{TIME_JSON}\n</tool_calls>", [ROME]),
        (tagged(ROME_JSON, '{"name": "ti').partition("\n</")[0], '\n{"name": "ti', [ROME]),
        (f"{GRANITE}\n{TIME_JSON} So.", " So.", [ROME, TIME]),
        (f"<tool_call>{ROME_JSON}, and so on.", ", and so on.", [ROME]),
        (tagged('{"a": 1}', TIME_JSON), None, []),
        ('<tool_call>{"id": "0", "type": "function", "name": "time"}</tool_call>', "", [TIME]),
        ('<tool_call>{"name": "time", "args": {"zone": "UTC"}}</tool_call>', None, []),
        ('<tool_call>{"name": "time", "arguments": null, "zone": "UTC"}</tool_call>', None, []),
        (tagged('{"name": "weather", "input": {"city": "Rome"}}', TIME_JSON), None, []),
        (f"<tool_call>{NO_ARGUMENTS} {{</tool_call>", None, []),
        (f"<tool_call>{NO_ARGUMENTS} 5</tool_call>", None, []),
        ('<tool_call>{"name": "time", "arguments": 5}</tool_call>', None, []),
        ('<tool_call>{"name": "time", "arguments": "noon"}</tool_call>', None, []),
        ('<tool_call>{"name": "time", "arguments": "[1]"}</tool_call>', None, []),
        (NO_ARGUMENTS, None, []),
        (NULL, None, []),
        (f"[{NO_ARGUMENTS}]", None, []),
        (TEXT, "", [ROME]),
        (array(ROME_JSON, '{"a": 1}', TIME_JSON) + " So.", '{"a": 1} So.', [ROME, TIME]),
        (array(ROME_JSON, '{"name": "ti').partition("]<")[0], '{"name": "ti', [ROME]),
        (f"[{ROME_JSON}, {NO_ARGUMENTS}]", "", [ROME, TIME]),
        (LIST, "", [ROME, TIME]),
        (f" \n{LIST}\n", "", [ROME, TIME]),
        (f"{LIST} So.", None, []),
        (f"I ask: {LIST}", None, []),
        (LIST.removesuffix("]"), None, []),
        (LIST.replace("time", "rain"), None, []),
        (LIST.replace("weather", "rain"), None, []),
        (f"{LIST}]", None, []),
        ("[weather('Rome')]", None, []),
        ("[weather(city='Ro", None, []),
        ("[weather(city='Rome'", None, []),
        ("[weather", None, []),
        ("[time(a=[1]", None, []),
        (f"{LIST} <tool_call>{TIME_JSON}</tool_call>", LIST, [TIME]),
        ("[time(a='<tool_call>]')]", "", [ToolCall("time", '{"a": "<tool_call>]"}')]),
        (f"{LIST}<|python_end|>", None, []),
        (LLAMA_4.removesuffix("<|python_end|>"), "", [ROME, TIME]),
        ("<|python_start|>print(1)<|python_end|>", None, []),
        ("<|python_start|> or <|python_start|><|python_end|>So.", None, []),
        (OLMO.replace("time", "rain"), "", [ROME]),
        (OLMO.replace("weather", "rain"), None, []),
        ("A <function_calls> or <function_calls>\nweather b", None, []),
        ("<function_calls>\nweather(city='Ro", "", [cut("weather", '{"city": "Ro')]),
        (
            '<function_calls><invoke name="time">\n</invoke></function_calls>',
            "<function_calls></function_calls>",
            [TIME],
        ),
        (APERTUS.replace("time", "rain"), ', {"rain": {}}]<|tools_suffix|>', [ROME]),
        (APERTUS.replace("weather", "rain"), None, []),
        ('A <|tools_prefix|> or <|tools_prefix|>[{"weather" b', None, []),
        ('<|tools_prefix|>[{"weather": {"city": "Ro', "", [cut("weather", '{"city": "Ro')]),
        (f"<|inner_prefix|>I may {APERTUS}.<|inner_suffix|>{APERTUS}", None, [ROME, TIME]),
    ],
)
def test_calls_that_are_written_otherwise(text: str, rest: str | None, calls: Sequence[ToolCall]) -> None:
    reason = "length" if calls and not calls[-1].complete else "stop"
    rest = text.removesuffix(APERTUS) if rest is None else rest
    assert split(USE, text, reason) == (rest, calls)
    for size in (1, 3):
        assert streams_as_a_whole(USE, text, [size] * len(text), reason) == calls


def test_only_the_first_call_of_several_if_one_is_allowed() -> None:
    one = ToolUse("auto", USE.names, several=False)
    for text in (*ALL, LIST):
        assert split(one, text, "stop") == ("", [ROME])


def test_the_second_call_between_two_tags_is_streamed() -> None:
    streamed = StreamedCalls(USE)
    pieces = [
        "<tool_calls>\n",
        f"{TIME_JSON}\n",
        '{"name": "weather", "arguments": {"ci',
        'ty": "Rome"',
        "}}\n</tool_calls>",
    ]
    told = [streamed.take(Delta(0, piece))[1] for piece in pieces]
    told.append(streamed.take(Delta(0, "", "stop"))[1])
    assert [each for each in told if each] == [
        [CallDelta(0, "{}", "time", last=True)],
        [CallDelta(1, '{"ci', "weather")],
        [CallDelta(1, 'ty": "Rome"')],
        [CallDelta(1, "}", last=True)],
    ]


def test_a_list_that_is_not_all_of_the_answer_is_text_as_soon_as_this_is_known() -> None:
    reader = CallReader(USE)
    assert [reader.push(piece, None) for piece in ("[time()", "] is", " it")] == [[], ["[time()] is"], [" it"]]


@pytest.mark.parametrize("text", [LIST, *(text for text in ALL if "|" in text or "function_calls" in text)])
def test_templates_that_show_these_calls_are_known(text: str) -> None:
    assert is_known_call(f"<user>Hi<assistant>{text}<end>", "<user>Hi<assistant>", "weather")
    assert not is_known_call(f"<user>Hi<assistant>{text}<end>", "<user>Hi<assistant>", "rain")


def test_objects_one_after_another_are_calls_only_between_tags() -> None:
    text = f"{ROME_JSON}\n{NO_ARGUMENTS}"
    assert calls_in(AUTO.names, text, tagged=True) == [(ROME.name, ROME.arguments), ("time", "{}")]
    assert calls_in(AUTO.names, text) == []
    assert calls_in(AUTO.names, f"{text} 5", tagged=True) == []
    assert (
        calls_in(AUTO.names, "[" * 100_000, tagged=True) == calls_in(AUTO.names, '{"a":' * 100_000, tagged=True) == []
    )


PARTS = [
    *ALL,
    LIST,
    LIST[:20],
    "So:",
    "\n",
    " ",
    "<",
    "[",
    "]",
    "{",
    "}",
    ",",
    ";",
    "(",
    ")",
    "=",
    '"',
    "'",
    ROME_JSON,
    TEXT,
]
PARTS += [
    NO_ARGUMENTS,
    NULL,
    TIME_JSON,
    RAIN_JSON,
    REORDERED,
    '{"name": "time"',
    '{"a": 1}',
    "<tool_call>",
    "</tool_call>",
]
PARTS += ["<tool_calls>[", "]</tool_calls>", "<tool_calls>", "</tool_calls>", "<|python_start|>", "<|python_end|>"]
PARTS += [
    "<function_calls>",
    "</function_calls>",
    "weather(",
    "time()",
    "rain()",
    "city='Rome'",
    "it's",
    "\\",
    " " * 120,
]
PARTS += [
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    '{"weather": ',
    '[{"time": {}',
    "a" * 300,
    "<|inner_prefix|>",
    "[time(",
]


@given(
    use=st.sampled_from([USE, ToolUse("auto", USE.names, False, USE.schemas)]),
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    sizes=st.lists(st.sampled_from([1, 3, 40, 200]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
)
@example(use=USE, parts=[LIST, "\n", " " * 120], sizes=[1] * 300, reason="stop")
def test_a_stream_has_the_text_and_the_calls_of_the_whole_answer(
    use: ToolUse, parts: list[str], sizes: list[int], reason: str
) -> None:
    for call in streams_as_a_whole(use, "".join(parts), sizes, reason):
        if call.complete and "{" not in call.arguments[1:]:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("begin", "part", "end"),
    [
        ("", f"<tool_calls>{ROME_JSON}\n{NO_ARGUMENTS}</tool_calls>", ""),
        ("<tool_calls>", f"{ROME_JSON}\n", "</tool_calls>"),
        ("<tool_calls>[", f'{ROME_JSON}, {NO_ARGUMENTS}, {{"a": 1}}, ', "]</tool_calls>"),
        ("[", "time(a='it's'), ", "time()]"),
        ("[", "time(a='it's'), ", "time()] So."),
        ("[time(a='", "<tool_call>", "')] So."),
        ("<function_calls>", "time(a=[1])\n", "</function_calls>"),
        ("<|tools_prefix|>[", '{"time": {}}, ', '{"time": {}}]<|tools_suffix|>'),
    ],
)
def test_the_effort_for_one_long_piece_grows_with_its_length(begin: str, part: str, end: str) -> None:
    def copied(times: int) -> int:
        reader = CountingReader(USE)
        reader.push(f"{begin}{part * times}{end}", "stop")
        return reader.copied

    few, many = copied(4000), copied(32_000)
    assert many < 9 * few
