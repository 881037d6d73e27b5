"""Calls of LFM2, Command R and A, DeepSeek V3.2, Gemma 4, Kimi K3 and functionary 3.2."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway.test_call_forms import ROME, TIME, USE, check_call
from tests.gateway.test_call_forms import asked as asked_of_openai
from tests.gateway.test_tools import streams_as_a_whole
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.call_reader import CallReader
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, split
from trtforge.gateway.tools import ToolUse

LFM = "<|tool_call_start|>[weather(city='Rome', days=3), time()]<|tool_call_end|>"
LFM_JSON = (
    '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Rome", "days": 3}, "id": "a"}, '
    '{"name": "time", "arguments": {}}]<|tool_call_end|>'
)
COHERE = """<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome", "days": 3}},
    {"tool_call_id": "1", "tool_name": "time", "parameters": {}}
]<|END_ACTION|>"""
COMMAND_R = """Action: ```json
[
    {
        "tool_name": "weather",
        "parameters": {"city": "Rome", "days": 3}
    },
    {
        "tool_name": "time",
        "parameters": {}
    }
]```"""
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="time">
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
DSML_4 = DSML.replace("function_calls", "tool_calls")
GEMMA = '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:3}<tool_call|><|tool_call>call:time{}<tool_call|>'
KIMI = (
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="time" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
FUNCTIONARY = 'weather\n{"city": "Rome", "days": 3}>>>time\n{}'
ALL = [LFM, LFM_JSON, COHERE, COMMAND_R, DSML, DSML_4, GEMMA, KIMI, FUNCTIONARY]


def cut(name: str, arguments: str) -> ToolCall:
    return ToolCall(name, arguments, complete=False)


@pytest.mark.parametrize("text", ALL)
def test_calls_are_recognised_whole_and_in_pieces(text: str) -> None:
    assert split(USE, text, "stop") == ("", [ROME, TIME])
    for size in (1, 2, 7):
        assert streams_as_a_whole(USE, text, [size] * len(text), "stop") == [ROME, TIME]
    assert streams_as_a_whole(USE, f"{text} So.", [5] * len(text), "stop") == [ROME, TIME]


@pytest.mark.parametrize("text", ALL[:-1])
def test_text_before_calls_is_the_content(text: str) -> None:
    assert split(USE, f"I ask.\n{text}", "stop") == ("I ask.", [ROME, TIME])
    other = text.replace("weather", "rain").replace("time", "rain")
    assert split(USE, other, "stop") == (other, [])
    assert streams_as_a_whole(USE, other, [3] * len(other), "length") == []


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("<|tool_call_start|> [ weather( city = 'Rome' , days = 3 ) ] <|tool_call_end|> So.", " So.", [ROME]),
        ("<|tool_call_start|>weather(city='Rome', days=3)<|tool_call_end|>", "", [ROME]),
        ("<|tool_call_start|>[weather(city='Rome', days=3,), rain(a=')', b=[1]), time()]", "", [ROME, TIME]),
        ("<|tool_call_start|>[time()", "", [TIME]),
        ("<|tool_call_start|>[rain(a=1), time()]<|tool_call_end|>", None, []),
        ("<|tool_call_start|>[]<|tool_call_end|>", None, []),
        ("A <|tool_call_start|> or <|tool_call_start|>[ti me", None, []),
        ('<|tool_call_start|>[time("noon")]<|tool_call_end|>', '"noon")]<|tool_call_end|>', [cut("time", "")]),
        (
            "<|tool_call_start|>[weather(city=f(1)), time()]<|tool_call_end|>",
            "f(1)), time()]<|tool_call_end|>",
            [cut("weather", '{"city": ')],
        ),
        ("<|tool_call_start|>[weather(city='Ro", "", [cut("weather", '{"city": "Ro')]),
        ("<|tool_call_start|>[weather(city='Rome'", "", [cut("weather", '{"city": "Rome"')]),
        ("<|tool_call_start|>[weather(city='Rome', days=1", "", [cut("weather", '{"city": "Rome", "days": ')]),
        (
            "<|tool_call_start|>[weather(days=3<|tool_call_end|> So.",
            " So.",
            [cut("weather", '{"days": 3')],
        ),
        ("<|tool_call>call:time{} So.", " So.", [TIME]),
        ("<|tool_call>call:rain{}<tool_call|>", None, []),
        ("A <|tool_call> or <|tool_call>call me", None, []),
        ('<|tool_call>call:weather{city:<|"|>Ro', "", [cut("weather", '{"city": "Ro')]),
        ('<|tool_call>call:weather{city:<|"|>Rome<|"|', "", [cut("weather", '{"city": "Rome<|\\"|')]),
        ("<|tool_call>call:weather{days:3", "", [cut("weather", '{"days": ')]),
        ("<|START_ACTION|>[]<|END_ACTION|>", None, []),
        ('<|START_ACTION|>{"tool_name": "time", "parameters": {}}<|END_ACTION|>', "", [TIME]),
        ('<|START_ACTION|>[{"parameters": {}, "tool_name": "time"}]<|END_ACTION|> So.', " So.", [TIME]),
        (
            f"<|START_THINKING|>I may {COHERE}.<|END_THINKING|>{COHERE}",
            f"<|START_THINKING|>I may {COHERE}.<|END_THINKING|>",
            [ROME, TIME],
        ),
        (
            f"<|channel>thought\nI may {GEMMA}.<channel|>{GEMMA}",
            f"<|channel>thought\nI may {GEMMA}.<channel|>",
            [ROME, TIME],
        ),
        (DSML.partition("\n</｜DSML｜invoke>")[0], "", [ROME]),
        (DSML.partition("\n")[2], "", [ROME, TIME]),
        (DSML.replace("\n", ""), "", [ROME, TIME]),
        (DSML.replace(' string="true"', "").replace(' string="false"', ""), "", [ROME, TIME]),
        ("A <｜DSML｜function_calls> or <｜DSML｜invoke name", None, []),
        ('A <|open|>tools<|sep|> or <|open|>call tool="weather" b', None, []),
        ("weather\nIt rains.", None, []),
        (">>> weather", None, []),
    ],
)
def test_calls_that_are_written_otherwise(text: str, rest: str | None, calls: Sequence[ToolCall]) -> None:
    reason = "length" if calls and not calls[-1].complete else "stop"
    assert split(USE, text, reason) == (text if rest is None else rest, calls)
    assert streams_as_a_whole(USE, text, [1] * len(text), reason) == calls


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'Rome'", "Rome"),
        ('"Rome"', "Rome"),
        ("''", ""),
        ('"""a\n"b" \'c\'"""', "a\n\"b\" 'c'"),
        ("'it's'", "it's"),
        ("'sed -n '1,9p' f'", "sed -n '1,9p' f"),
        ("'a\nb\tü'", "a\nb\tü"),
        (r"'a\n\t\\\'\"\x41\u00fc\U0001F600\101\q'", "a\n\t\\'\"Aü😀A\\q"),
        (r"'\ud83d'", "\ud83d"),
        (r"'\x4 \U99999999'", r"\x4 \U99999999"),
        ("'a\\\nb'", "ab"),
        ("5", 5),
        ("-5.5e3", -5500.0),
        ("07", 7),
        ("+7", 7),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e999", "1e999"),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("Rome", "Rome"),
        ("[]", []),
        ("[1, 'a', [True], ]", [1, "a", [True]]),
        ("(1, 2)", [1, 2]),
        ("{}", {}),
        ("{'a': {'b': 'it's', \"c\": [None]}, 'd:e': 1}", {"a": {"b": "it's", "c": [None]}, "d:e": 1}),
        ("{1: 'a'}", {"1": "a"}),
        ("[" * 40 + "]" * 40, json.loads("[" * 40 + "]" * 40)),
    ],
)
def test_values_of_python(written: str, value: object) -> None:
    text = f"<|tool_call_start|>[time(a={written}, zone='x')]<|tool_call_end|>"
    (call,) = streams_as_a_whole(USE, text, [1] * len(text), "stop")
    assert call.complete
    assert json.loads(call.arguments) == {"a": value, "zone": "x"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('<|"|>Rome<|"|>', "Rome"),
        ('<|"|><|"|>', ""),
        ('<|"|>a "b", \\n{c}: <d> <|"<|"|>', 'a "b", \\n{c}: <d> <|"'),
        ("5", 5),
        ("-1.5", -1.5),
        ("true", True),
        ("null", None),
        ("noon", "noon"),
        ('{b:<|"|>c<|"|>,d:[1,<|"|>e<|"|>,{}]}', {"b": "c", "d": [1, "e", {}]}),
        ('{<|"|>3<|"|>:<|"|>x<|"|>}', {"3": "x"}),
        ("[]", []),
    ],
)
def test_values_of_gemma(written: str, value: object) -> None:
    text = f'<|tool_call>call:time{{a:{written},zone:<|"|>x<|"|>}}<tool_call|>'
    (call,) = streams_as_a_whole(USE, text, [1] * len(text), "stop")
    assert call.complete
    assert json.loads(call.arguments) == {"a": value, "zone": "x"}


def test_words_have_the_types_of_their_schema() -> None:
    text = "<|tool_call_start|>[weather(city=5, days=07, str=007, wind=TRUE, other=1.50)]<|tool_call_end|>"
    (call,) = split(USE, text, "stop")[1]
    assert call.arguments == '{"city": "5", "days": 7, "str": "007", "wind": true, "other": 1.50}'


@pytest.mark.parametrize(
    ("name", "attribute", "text", "value"),
    [
        ("city", "true", "5", "5"),
        ("city", "false", "5", "5"),
        ("days", "true", "5", 5),
        ("days", "false", " 5 ", 5),
        ("other", "true", "5", "5"),
        ("other", "false", "5", 5),
        ("at", "true", '{"x": 1}', '{"x": 1}'),
        ("at", "false", '{"x": 1}', {"x": 1}),
        ("unit", "true", " C ", "C"),
        ("places", "false", '["a", "b"]', ["a", "b"]),
    ],
)
def test_a_tag_may_say_that_its_value_is_a_string(name: str, attribute: str, text: str, value: object) -> None:
    parameter = f'<｜DSML｜parameter name="{name}" string="{attribute}">{text}</｜DSML｜parameter>'
    written = f'<｜DSML｜invoke name="weather">\n{parameter}\n</｜DSML｜invoke>'
    (call,) = split(USE, written, "stop")[1]
    assert json.loads(call.arguments) == {name: value}


def test_strings_come_as_they_are_written() -> None:
    pieces = ["<|tool_call_start|>[wea", "ther(ci", "ty='Ro", "me", "'", ", days=1", "2", ")", "]<|tool_call_end|>"]
    streamed = StreamedCalls(USE)
    told = [streamed.take(Delta(0, piece))[1] for piece in pieces]
    told.append(streamed.take(Delta(0, "", "stop"))[1])
    assert [each for each in told if each] == [
        [CallDelta(0, "", "weather")],
        [CallDelta(0, '{"city": "Ro')],
        [CallDelta(0, "me")],
        [CallDelta(0, '", "days": ')],
        [CallDelta(0, "12}", last=True)],
    ]


PARTS = [*ALL, "So:", "\n", " ", "<", "weather", "time", "rain", "(", ")", "[", "]", "{", "}", ",", ":", "=", "'", '"']
PARTS += ["<|tool_call_start|>", "<|tool_call_start|>[", "<|tool_call_end|>", "weather(", "city='Rome'", "days=3", "\\"]
PARTS += [
    "time()",
    ", ",
    '"""',
    "it's",
    "\\n",
    "\\x4",
    "\\u12",
    "None",
    "07",
    "<|tool_call>",
    "call:",
    '<|"|>',
    "city:",
]
PARTS += ["<tool_call|>", "call:weather{", "<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "0", ', ">>>", "\n{"]
PARTS += [
    '"tool_name": "time", ',
    '"parameters": {}}',
    "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="',
    'weather">',
]
PARTS += [
    '<｜DSML｜parameter name="city" string="true">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    " " * 120,
    "a" * 300,
]
PARTS += [
    'weather">',
    "a" * 300,
    "city:",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|channel>thought\n",
    "<channel|>",
    "Action: ```json",
    "```",
]
PARTS += ["<|open|>", "<|close|>", "<|sep|>", 'call tool="time"', '<|open|>argument key="city" type="string"<|sep|>']


@given(
    use=st.sampled_from([USE, ToolUse("auto", USE.names, False, USE.schemas)]),
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    sizes=st.lists(st.sampled_from([1, 3, 40, 200]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
)
@example(use=USE, parts=[LFM, "\n", GEMMA], sizes=[1] * 300, reason="stop")
def test_a_stream_has_the_text_and_the_calls_of_the_whole_answer(
    use: ToolUse, parts: list[str], sizes: list[int], reason: str
) -> None:
    for call in streams_as_a_whole(use, "".join(parts), sizes, reason):
        if call.complete and "{" not in call.arguments[1:]:
            assert isinstance(json.loads(call.arguments), dict)


@given(
    head=st.sampled_from(["<|tool_call_start|>[weather(", "<|tool_call>call:weather{"]),
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    sizes=st.lists(st.sampled_from([1, 3, 40]), min_size=1, max_size=9),
    reason=st.sampled_from(["stop", "length"]),
)
def test_complete_arguments_in_literals_are_json(head: str, parts: list[str], sizes: list[int], reason: str) -> None:
    for call in streams_as_a_whole(USE, head + "".join(parts), sizes, reason)[:1]:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("words", [LFM.replace(", time()", ""), GEMMA.partition("<|tool_call>call:time")[0]])
def test_openais_client_reads_a_call_in_literals(words: str) -> None:
    with asked_of_openai(words) as (_, choices):
        for choice in choices:
            check_call(choice, None)


class CountingReader(CallReader):
    """Counts the characters that are copied where text is taken."""

    copied = 0

    def _take(self, size: int) -> str:
        self.copied += len(self._unread)
        return super()._take(size)


@pytest.mark.parametrize(
    "part",
    [
        "Write <tool_call> or <function=. ",
        "<｜DSML｜parameter",
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>\n',
        "<function=weather><parameter=city>Rome</parameter><parameter=days>3</parameter></function>",
        "<|tool_call_start|>[time(a='it's', b=[1, 2], c={'d': None})]<|tool_call_end|>",
        '<|tool_call>call:time{a:<|"|>b<|"|>,c:[1,2]}<tool_call|>',
    ],
)
def test_the_effort_for_one_long_piece_grows_with_its_length(part: str) -> None:
    def copied(times: int) -> int:
        reader = CountingReader(USE)
        reader.push(part * times, "stop")
        return reader.copied

    few, many = copied(1000), copied(8000)
    assert many < 9 * few


@pytest.mark.parametrize(("begin", "end"), [("Action: ```json\n", "\n```"), ("<|START_ACTION|>", "<|END_ACTION|>")])
def test_long_json_that_is_no_call_is_told_once_it_ends(begin: str, end: str) -> None:
    text = f'I show:\n{begin}{{"a": "{"b" * 2000}"}}{end}'
    reader, told = CallReader(USE), ""
    for start in range(0, len(text), 50):
        told += "".join(map(str, reader.push(text[start : start + 50], None)))
    assert told == text
