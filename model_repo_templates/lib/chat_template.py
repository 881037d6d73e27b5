"""A `messages` input to a prompt, by the tokenizer's own Jinja template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from responder import RequestFailed

from trtforge.core.prompt_template import PromptTemplate

_MOST_MESSAGES = 4096
_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "guide_allows_calls",
    }
)
_EFFORT = "reasoning_effort"
_SHOWN = 200
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class Chat:
    """A prompt, and the tools that its template was given. `continues`: the answer continues the final message.

    `guide_allows_calls`: of the request's guide, which is then that of answers that call nothing.
    """

    prompt: str
    tools: Sequence[Any]
    continues: bool
    guide_allows_calls: bool = False


class ChatTemplate:
    """The templates of one tokenizer. `values`: of the file `chat.json`, which packaging wrote.

    `tool_template`: the Jinja text for requests with tools.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._default = PromptTemplate(values["template"])
        self.tool_template: str = values.get("tool_template") or values["template"]
        self._with_tools = PromptTemplate(self.tool_template)
        self._special_tokens: Mapping[str, Any] = values["special_tokens"]

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """The templates in a directory's `chat.json`."""
        return cls(json.loads((directory / "chat.json").read_text(encoding="utf-8")))

    def chat(self, text: str) -> Chat:
        """What a `messages` input makes: JSON, an array of messages or an object with more fields.

        Raises RequestFailed for other JSON, for fields of wrong types, and for messages that the template refuses.
        """
        request = _parsed(text)
        messages = list(request["messages"])
        tools = request.get("tools") or None
        to_continue = bool(request.get("continue_final_message", False))
        if to_continue:
            messages[-1] = _marked(messages[-1])
        template = self._with_tools if tools else self._default
        variables = request.get("chat_template_kwargs") or {}
        documents = request.get("documents")
        values = {
            **self._special_tokens,
            **variables,
            "tools": tools,
            "documents": (variables.get("documents") if documents is None else documents) or None,
            "add_generation_prompt": bool(request.get("add_generation_prompt", not to_continue)),
        }
        try:
            prompt = _rendered(template, messages, values)
            prompt.encode()
        except UnicodeEncodeError:
            raise RequestFailed("messages: a string has half a surrogate pair, which is not valid Unicode") from None
        except TemplateError as error:
            raise RequestFailed(f"messages: the chat template refuses them: {_shortened(error)}") from None
        except Exception as error:  # the template's expressions raise any
            raise RequestFailed(
                f"messages: the chat template cannot render them: {type(error).__name__}: {_shortened(error)}"
            ) from None
        allows_calls = bool(request.get("guide_allows_calls", False))
        return Chat(_up_to_mark(prompt) if to_continue else prompt, tools or (), to_continue, allows_calls)


def _rendered(template: PromptTemplate, messages: list[Any], values: Mapping[str, Any]) -> str:
    """The prompt. With thinking turned off the effort "none" says no more, so templates that refuse it get none."""
    try:
        return template.render(messages, values)
    except TemplateError:
        if values.get("enable_thinking") is not False or values.get(_EFFORT) != "none":
            raise
        return template.render(messages, {name: value for name, value in values.items() if name != _EFFORT})


def _parsed(text: str) -> dict[str, Any]:
    try:
        request = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestFailed("messages is not JSON") from None
    if isinstance(request, list):
        request = {"messages": request}
    if not isinstance(request, dict):
        raise RequestFailed("messages is neither an array of messages nor an object that has one")
    unknown = sorted(request.keys() - _FIELDS)
    if unknown:
        raise RequestFailed(f"messages: the field {unknown[0][:_SHOWN]!r} is not one of {', '.join(sorted(_FIELDS))}")
    _check_messages(request.get("messages"))
    for name, kind in (("tools", list), ("documents", list), ("chat_template_kwargs", dict)):
        if request.get(name) is not None and not isinstance(request[name], kind):
            raise RequestFailed(f"messages: {name} is not an {'array' if kind is list else 'object'}")
    return request


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestFailed("messages: there must be at least one message")
    if len(messages) > _MOST_MESSAGES:
        raise RequestFailed(f"messages: there are {len(messages)} messages; at most {_MOST_MESSAGES} are allowed")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestFailed(f"messages: message {index} has no role")


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The final message with a mark after its text, where the answer begins."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + _MARK}
                return {**message, "content": [*content[:index], marked, *content[index + 1 :]]}
    raise RequestFailed("messages: the final message has no text that an answer could continue")


def _up_to_mark(prompt: str) -> str:
    """The prompt up to the mark; without the text's trailing spaces if the template trims them, as it trims the mark's.

    Source: `render_jinja_template` in transformers/utils/chat_template_utils.py.
    """
    end = prompt.rfind(_MARK.strip())
    if end < 0:
        raise RequestFailed("messages: the chat template leaves out the final message, which an answer cannot continue")
    kept = prompt[:end]
    return kept if prompt[end:].startswith(_MARK) else kept.rstrip()


def _shortened(error: Exception) -> str:
    text = str(error).strip()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
