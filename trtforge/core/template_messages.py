"""The messages of a chat in the forms that the chat templates of some families take, where these differ from OpenAI's.

What a template takes is read from its Jinja text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CHANNEL = "<|channel|>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_KIMI_CALL = "<|tool_call_begin|>"
_CONTENT_IS_NONE = re.compile(r"\bcontent['\"]?\]?\s+is\s+none")


class TemplateMessages:
    """What one template is given. `source`: its Jinja text.

    - Most templates take the arguments of a call as an object; those of DeepSeek V3 and R1 append them to a text, and
      show calls only in messages without content, which they test by `is none`.
    - gpt-oss's shows one call of a message, and the results that follow are that call's. It refuses a message that has
      reasoning, content and a call; with one of them, it shows that as reasoning.
    - Kimi K2's shows the names of functions as part of the calls' ids alone (docs/tool_call_guidance.md of
      moonshotai/Kimi-K2-Instruct).
    """

    def __init__(self, source: str) -> None:
        self._is_harmony = _CHANNEL in source
        self._shows_ids = _KIMI_CALL in source
        self._tests_content = _DEEPSEEK_CALL in source and _CONTENT_IS_NONE.search(source) is not None

    def rendered(self, render: Callable[[list[Message]], str], messages: Sequence[Message]) -> str:
        """What `render` makes of the messages. Raises what it raises."""
        shown = self._shown(messages)
        try:
            return render(shown)
        except TypeError:
            written = [_with_written_arguments(message) for message in shown]
            if written == shown:
                raise
            return render(written)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        shown = [_with_reasoning(message) for message in messages]
        if self._tests_content:
            return [_without_empty_content(message) for message in shown]
        if self._is_harmony:
            return list(_with_one_call_each([_with_content_as_reasoning(message) for message in shown]))
        return list(_with_named_ids(shown)) if self._shows_ids else shown


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under all the names that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _without_empty_content(message: Message) -> Message:
    return {**message, "content": None} if message.get("tool_calls") and message.get("content") == "" else message


def _with_content_as_reasoning(message: Message) -> Message:
    content, reasoning = message.get("content"), message.get("thinking")
    if not message.get("tool_calls") or not isinstance(content, str) or not content or not isinstance(reasoning, str):
        return message
    return {**message, "thinking": f"{reasoning}\n\n{content}".lstrip(), "content": ""}


def _with_one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call in a message of its own, which its results follow; results of no call follow the last one."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = _calls(message)
        if len(calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            yield {**(message if number == 0 else {"role": message.get("role"), "content": ""}), "tool_calls": [call]}
            identity = call.get("id") if isinstance(call, Mapping) else None
            answered = [result for result in results if result.get("tool_call_id") == identity]
            yield from results if number == len(calls) - 1 else answered
            results = [result for result in results if result not in answered]


def _with_named_ids(messages: Iterable[Message]) -> Iterator[Message]:
    """Calls with the ids `functions.NAME:NUMBER`, by their place among all calls, and results with those of calls."""
    named, number = dict[str, str](), 0
    for message in messages:
        shown, calls = dict(message), []
        for call in _calls(message):
            name = _text(call.get("function"), "name") if isinstance(call, Mapping) else None
            if name is not None:
                shown_id = f"functions.{name}:{number}"
                named[_text(call, "id") or shown_id] = shown_id
                call = {**call, "id": shown_id}
            calls.append(call)
            number += 1
        if calls:
            shown["tool_calls"] = calls
        answered = _text(message, "tool_call_id")
        if answered is not None:
            shown["tool_call_id"] = named.get(answered, answered)
        yield shown


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
    return calls if isinstance(calls, list) else ()


def _text(values: Any, name: str) -> str | None:
    found = values.get(name) if isinstance(values, Mapping) else None
    return found if isinstance(found, str) else None
