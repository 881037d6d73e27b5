"""Converts the messages and tools of a chat to the forms that the chat templates of some families need, if they differ
from OpenAI's.

The form that a template needs is found from its Jinja text.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from trtforge.core.call_tags import DEEPSEEK_CALL, KIMI_CALL
from trtforge.core.harmony import CHANNEL
from trtforge.core.template_tools import Message, Tools, filled_tools, with_description, with_tools_in_system

Render = Callable[[list[Message], Tools | None], str]
"""Makes a prompt of messages and tools."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESULT = "tool"
_TRIED_NAME = "tried_function_name"
_OF_NINE = re.compile(r"\bid['\"]?\]?\s*\|\s*length\s*!=\s*9\b")
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NUMBER_OF_CALLS = r"\btool_calls['\"]?\]?\s*\|\s*(?:length|count)\b"
_REFUSES_SEVERAL = re.compile(
    rf"{_NUMBER_OF_CALLS}\s*\)?\s*(?:!=|==|>)\s*1\s*\)?\s*[-+]?%\}}\s*\{{\{{[-+]?\s*raise_exception\b"
)
_READS_THOUGHT_BLOCKS = re.compile(r"\btype['\"]?\]?\s*==\s*['\"]thinking['\"]")
_READS_TOOLS = re.compile(r"(?<![\w.'\"])tools(?![\w'\"])")
_READS_TOOLS_OF_MESSAGES = re.compile(r"\bmessage(?:\[['\"]tools['\"]\]|\.tools\b)|['\"]tools['\"]\s+in\s+message\b")
_COMPARED_WITH_NONE = re.compile(r"\bcontent['\"]?\]?\s*(?:is\s|==|!=)\s*(?:not\s+)?none", re.IGNORECASE)


class TemplateMessages:
    """What one template is given. `source`: its Jinja text.

    - Most templates take the arguments of a call as an object; those of DeepSeek append them to a text. Those of V3 and
      R1 show calls only in messages without content, which they test by `is none`; that of V3.1 and vLLM's for R1 show
      both, and vLLM's fails for content that is null (examples/tool_chat_template_deepseekr1.jinja).
    - gpt-oss's shows one call of a message, and results as those of the last call before them. It refuses a message
      that has reasoning, content and a call; with one of them, it shows that as reasoning. It fails for functions
      without a description, which OpenAI's API allows.
    - Those of Llama 3.1 and 3.2 refuse messages with several calls, but take answers in a row (chat template of
      meta-llama/Llama-3.2-1B-Instruct).
    - Kimi K2's shows the names of functions as part of the calls' ids alone (docs/tool_call_guidance.md of
      moonshotai/Kimi-K2-Instruct).
    - Phi-4-mini's shows no tools but those that the system message has, as a text: the JSON of their functions (chat
      template and model card of microsoft/Phi-4-mini-instruct).
    - Those of Mistral's reasoning models show reasoning only as a block of the content (chat template of
      mistralai/Ministral-3-14B-Reasoning-2512).
    - Those of Command R7B and A, Seed-OSS, Apertus and Hermes fail for functions without a description or parameters,
      those of Command R also for parameters without a description; OpenAI's API allows both. They get empty ones.
    - Those of Mistral's models of 2024 refuse ids that do not have nine characters (chat template of
      mistralai/Mistral-Nemo-Instruct-2407).
    """

    def __init__(self, source: str) -> None:
        self._is_harmony = CHANNEL in source
        self._refuses_several = _REFUSES_SEVERAL.search(source) is not None
        self._id_of = _id_with_name if KIMI_CALL in source else _short_id if _OF_NINE.search(source) else None
        self._knows_none = _COMPARED_WITH_NONE.search(source) is not None
        self._reads_tools_of_messages = (
            _READS_TOOLS_OF_MESSAGES.search(source) is not None and _READS_TOOLS.search(source) is None
        )
        self._thinks_in_content = _READS_THOUGHT_BLOCKS.search(source) is not None and _REASONING[0] not in source
        self._tests_content = DEEPSEEK_CALL in source and self._knows_none

    def prompt(self, render: Render, messages: Sequence[Message], tools: Tools | None) -> str:
        """What `render` makes of the messages and tools. Raises what it raises."""
        if tools and self._reads_tools_of_messages:
            messages = with_tools_in_system(messages, tools)
        described = [with_description(tool) for tool in tools] if tools and self._is_harmony else tools
        try:
            return self.rendered(_with_tools(render, described), messages)
        except MemoryError:
            raise
        except Exception:  # the template's expressions raise any
            for filled in filled_tools(described or ()):
                with suppress(Exception):
                    return self.rendered(_with_tools(render, filled), messages)
            raise

    def rendered(self, render: Callable[[list[Message]], str], messages: Sequence[Message]) -> str:
        """As `prompt`, for a `render` that has the tools: models that trtforge 0.2.1 packaged call it."""
        shown = self._shown(messages)
        if self._tests_content:
            shown = _with_calls_shown(render, shown)
        try:
            return render(shown)
        except TypeError:
            written = [_with_written_arguments(message) for message in shown]
            if written == shown:
                raise
            return render(written)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        kept = ("content",) if self._knows_none else ()
        shown = [_with_reasoning(_without_nulls(message, kept)) for message in messages]
        if self._thinks_in_content:
            shown = [_with_thought_block(message) for message in shown]
        if self._tests_content:
            return shown
        if self._is_harmony:
            shown = [_with_content_as_reasoning(message) for message in shown]
        if self._is_harmony or (self._refuses_several and any(len(_calls(message)) > 1 for message in shown)):
            shown = list(_with_one_call_each(shown))
        return shown if self._id_of is None else list(_with_ids(shown, self._id_of))


def _with_tools(render: Render, tools: Tools | None) -> Callable[[list[Message]], str]:
    return lambda messages: render(messages, tools)


def _without_nulls(message: Message, kept: Collection[str]) -> Message:
    """A message without null fields, which many templates show as "None"; `transformers` leaves them out, too.

    `kept`: fields that the template compares with none; without them it would fail or show nothing.
    """
    return {name: value for name, value in message.items() if value is not None or name in kept}


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under all the names that templates read."""
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _with_thought_block(message: Message) -> Message:
    """An assistant's message with its reasoning as the first block of its content."""
    reasoning, content = message.get(_REASONING[0]), message.get("content")
    if message.get("role") != "assistant" or not isinstance(reasoning, str) or not reasoning:
        return message
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *blocks]}


def _only_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) and message.get("content") in (None, "")


def _says_and_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) and bool(message.get("content"))


def _with_calls_apart(message: Message) -> Iterator[Message]:
    """A message; if it has content and calls, its calls follow in a message of their own."""
    if not _says_and_calls(message):
        yield message
        return
    yield {name: value for name, value in message.items() if name != "tool_calls"}
    yield {"role": message.get("role"), "content": None, "tool_calls": message["tool_calls"]}


def _with_calls_shown(render: Callable[[list[Message]], str], messages: list[Message]) -> list[Message]:
    """Messages with their calls where the template shows them: beside their content or apart from it.

    Content that is missing is null, but "" if the template shows calls beside that alone.
    """
    if any(map(_says_and_calls, messages)) and not _shows_call(render, _tried("Hi")):
        apart = [part for message in messages for part in _with_calls_apart(message)]
        messages = apart if _shows_call(render, *_with_calls_apart(_tried("Hi"))) else messages
    if any(map(_only_calls, messages)):
        empty = "" if not _shows_call(render, _tried(None)) and _shows_call(render, _tried("")) else None
        messages = [{**message, "content": empty} if _only_calls(message) else message for message in messages]
    return messages


def _tried(content: str | None) -> Message:
    """An answer with a call, to find out whether a template shows it."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _TRIED_NAME, "arguments": "{}"}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _shows_call(render: Callable[[list[Message]], str], *answers: Message) -> bool:
    """Whether a template shows the call of `_tried`; False if it refuses the messages."""
    try:
        return _TRIED_NAME in render([{"role": "user", "content": "Hi"}, *answers])
    except Exception:  # the template's expressions raise any
        return False


def _with_content_as_reasoning(message: Message) -> Message:
    content, reasoning = message.get("content"), message.get("thinking")
    if not message.get("tool_calls") or not isinstance(content, str) or not content or not isinstance(reasoning, str):
        return message
    return {**message, "thinking": f"{reasoning}\n\n{content}".lstrip(), "content": ""}


def _with_one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call in a message of its own, which its results follow.

    The results after several messages may be of any of their calls; those of other calls follow all these messages.
    """
    numbered: list[tuple[Message, int | None]] = []  # messages, and the numbers of their calls among all calls
    results: dict[int | None, list[Message]] = {}
    count = 0
    for message, answered in zip(messages, _answered(messages), strict=True):
        if message.get("role") == _RESULT:
            results.setdefault(answered, []).append(message)
            continue
        if results:
            yield from _with_results(numbered, results)
            numbered, results = [], {}
        for single in _split(message):
            calls = len(_calls(single))
            numbered.append((single, count if calls else None))
            count += calls
    yield from _with_results(numbered, results)


def _with_results(
    numbered: Iterable[tuple[Message, int | None]], results: Mapping[int | None, Sequence[Message]]
) -> Iterator[Message]:
    """Messages, each followed by the results of its call; the other results follow the last message."""
    others = dict(results)
    for message, number in numbered:
        yield message
        if number is not None:
            yield from others.pop(number, ())
    for each in others.values():
        yield from each


def _split(message: Message) -> Iterator[Message]:
    """A message with one call, and further ones with one call each."""
    calls = _calls(message)
    if len(calls) < 2:
        yield message
        return
    for index, call in enumerate(calls):
        own = {"role": message.get("role"), "content": ""} if index else message
        yield {**own, "tool_calls": [call]}


def _with_ids(messages: Sequence[Message], id_of: Callable[[Message, int], str | None]) -> Iterator[Message]:
    """Calls with other ids, which `id_of` makes of a call and its number among all calls; results with those of their
    calls."""
    ids = list[Any]()
    for message, answered in zip(messages, _answered(messages), strict=True):
        shown, calls = dict(message), []
        for call in _calls(message):
            made = id_of(call, len(ids)) if isinstance(call, Mapping) else None
            calls.append(call if made is None else {**call, "id": made})
            ids.append(calls[-1].get("id") if isinstance(calls[-1], Mapping) else None)
        if calls:
            shown["tool_calls"] = calls
        made = None
        if answered is not None:
            made = ids[answered]
        elif message.get("role") == _RESULT and message.get("tool_call_id"):
            made = id_of({"id": message["tool_call_id"]}, len(ids))
        yield shown if made is None else {**shown, "tool_call_id": made}


def _id_with_name(call: Message, number: int) -> str | None:
    """`functions.NAME:NUMBER`."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return f"functions.{name}:{number}" if isinstance(name, str) else None


def _short_id(call: Message, number: int) -> str:
    """The call's own id if it has nine letters and digits, else nine digits of its hash; its number if it has none."""
    given = call.get("id")
    if not isinstance(given, str) or not given:
        return f"{number:09d}"
    return given if _NINE.fullmatch(given) else sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _answered(messages: Iterable[Message]) -> list[int | None]:
    """For each message the number, among all calls, of the one whose result it is.

    A result belongs to the call with its id: one of those that it follows and that have no result yet, or the latest
    one. Without such a call it belongs to the first that it follows and that has no result.
    """
    found, latest, count = list[int | None](), dict[str, int](), 0
    waiting: dict[int, str] = {}
    ended = False  # whether results have followed the calls that wait
    for message in messages:
        found.append(None)
        calls, after_results, ended = _calls(message), ended, message.get("role") == _RESULT
        if ended:
            identity = _identity(message.get("tool_call_id"))
            same = next((number for number, each in waiting.items() if identity and each == identity), None)
            known = latest.get(identity) if same is None else same
            found[-1] = next(iter(waiting), None) if known is None else known
            if found[-1] is not None:
                waiting.pop(found[-1], None)
            continue
        if after_results or not calls:
            waiting.clear()
        for call in calls:
            identity = _identity(call.get("id") if isinstance(call, Mapping) else None)
            waiting[count] = identity
            if identity:
                latest[identity] = count
            count += 1
    return found


def _identity(given: object) -> str:
    """An id that can be compared, "" if there is none."""
    return "" if given is None or given == "" else repr(given)


def _with_written_arguments(message: Message) -> Message:
    """A message whose calls have their arguments as JSON texts."""
    calls = _calls(message)
    return {**message, "tool_calls": [_with_written(call) for call in calls]} if calls else message


def _with_written(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()
