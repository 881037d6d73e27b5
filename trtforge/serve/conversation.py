"""A chat with a served model: the messages so far and the streamed next answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.new_file import write_new
from trtforge.core.reasoning import NewReader, Reader, ReasoningParser, reader_of
from trtforge.serve.client import Generated, Sampling, generate
from trtforge.serve.request import Chat, Message, Piece

_ROLES = ("system", "user", "assistant")


@dataclass
class Conversation:
    """The messages of a chat with the text model `model` of the server at `url` (gRPC).

    `complete`: the tokenizer has no chat template, so each prompt is completed as it is, without history. `parser`: of
    the reasoning in answers to messages; None: reasoning stays in the text. `seeds`: the model takes seeds, so requests
    without one get a random seed and the answers to equal messages differ.
    """

    url: str
    model: str
    sampling: Sampling
    system: str | None = None
    complete: bool = False
    parser: ReasoningParser | None = None
    seeds: bool = False
    messages: list[Message] = field(default_factory=list)

    def answer(
        self, text: str, on_text: Callable[[str], None], on_reasoning: Callable[[str], None] | None = None
    ) -> Generated:
        """Send the user's `text` and return the answer without its reasoning.

        `on_text` receives the answer piece by piece, `on_reasoning` the reasoning before it. Later prompts contain the
        reasoning as the message's `reasoning_content`, for chat templates that use it. An interrupted answer
        (KeyboardInterrupt, ForgeError) does not change the conversation.
        """
        sampling = self.sampling.seeded() if self.seeds else self.sampling
        if self.complete:
            return generate(self.url, self.model, text, sampling, stream=True, on_text=on_text)
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        reads = sampling.guide is None
        apart = _Apart(partial(reader_of, self.parser, ()) if reads else None, on_text, on_reasoning)
        chat = Chat(self._opening(asked))
        sampling = replace(sampling, prompt_thought=reads and self.parser is not None)
        answer = generate(self.url, self.model, chat, sampling, stream=True, on_text=apart.push, on_first=apart.begin)
        apart.push("", last=True)
        self.messages = [*asked, {"role": "assistant", "content": apart.text, **apart.reasoning_content}]
        return replace(answer, text=apart.text)

    def reset(self) -> None:
        """Forget the messages; the system prompt stays."""
        self.messages = []

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises ForgeError if the file exists or cannot be written."""
        text = json.dumps({"messages": self._opening(self.messages)}, ensure_ascii=False, indent=2)
        write_new(path, f"{text}\n")

    def load(self, path: Path) -> None:
        """Continue the chat that `save` wrote. Raises ForgeError for any other file."""
        hint = "Give a file that /save wrote."
        values = read_json_object(path, hint=hint).get("messages")
        if not isinstance(values, list) or not all(_is_message(value) for value in values):
            raise ForgeError(f"{path}: not the messages of a chat", hint=hint)
        self.system = values[0]["content"] if values and values[0]["role"] == "system" else None
        self.messages = values[1:] if self.system is not None else values

    def _opening(self, messages: list[Message]) -> list[Message]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


class _Apart:
    """Separates an answer's text from its reasoning. `new_reader` None: no reasoning."""

    def __init__(
        self,
        new_reader: NewReader | None,
        on_text: Callable[[str], None],
        on_reasoning: Callable[[str], None] | None,
    ) -> None:
        self._new_reader = new_reader
        self._reader: Reader | None = None
        self._on_text, self._on_reasoning = on_text, on_reasoning
        self.text, self._reasoning = "", ""

    def begin(self, first: Piece) -> None:
        """Take the first response before its text."""
        self._reader = None if self._new_reader is None else self._new_reader(first.prompt_thought)

    def push(self, text: str, *, last: bool = False) -> None:
        """Take the next piece of the answer."""
        reasoning, text = ("", text) if self._reader is None else self._reader.push(text, last=last)
        self.text += text
        self._reasoning += reasoning
        if reasoning and self._on_reasoning is not None:
            self._on_reasoning(reasoning)
        if text:
            self._on_text(text)

    @property
    def reasoning_content(self) -> Message:
        """The reasoning as a part of the answer's message; empty without."""
        return {"reasoning_content": self._reasoning} if self._reasoning else {}


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    return all(isinstance(value.get(name, ""), str) for name in ("content", "reasoning_content")) and "content" in value
