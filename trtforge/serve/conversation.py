"""A chat with a served model: the messages so far, and the next answer as it is generated."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.new_file import write_new
from trtforge.serve.client import Generated, Sampling, generate
from trtforge.serve.request import Chat, Message

_ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """The messages of a chat with the text model `model` of the server at `url` (gRPC).

    `complete`: the tokenizer has no chat template, so each prompt is completed as it is, without history.
    """

    url: str
    model: str
    sampling: Sampling
    system: str | None = None
    complete: bool = False
    messages: list[Message] = field(default_factory=list)

    def answer(self, text: str, on_text: Callable[[str], None]) -> Generated:
        """Send the user's `text` and return the answer; `on_text` receives it piece by piece.

        An answer that is interrupted (KeyboardInterrupt, ForgeError) leaves the conversation as it was.
        """
        if self.complete:
            return generate(self.url, self.model, text, self.sampling, stream=True, on_text=on_text)
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        answer = generate(self.url, self.model, Chat(self._opening(asked)), self.sampling, stream=True, on_text=on_text)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer

    def reset(self) -> None:
        """Forget the messages; the system prompt stays."""
        self.messages = []

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises ForgeError if the file exists or cannot be written."""
        text = json.dumps({"messages": self._opening(self.messages)}, ensure_ascii=False, indent=2)
        write_new(path, f"{text}\n")

    def load(self, path: Path) -> None:
        """Continue the chat that `save` wrote. Raises ForgeError for a file that is not one."""
        hint = "Give a file that /save wrote."
        values = read_json_object(path, hint=hint).get("messages")
        if not isinstance(values, list) or not all(_is_message(value) for value in values):
            raise ForgeError(f"{path}: not the messages of a chat", hint=hint)
        self.system = values[0]["content"] if values and values[0]["role"] == "system" else None
        self.messages = values[1:] if self.system is not None else values

    def _opening(self, messages: list[Message]) -> list[Message]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)
