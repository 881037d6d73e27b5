"""Reasoning that a model writes before its answer, between `<think>` and `</think>`, apart from the answer's text.

The names are those of `trtllm-serve --reasoning_parser` (tensorrt_llm/llmapi/reasoning_parser.py).
"""

from collections.abc import Callable, Collection
from typing import Literal, get_args

from trtforge.core.harmony import HarmonyText
from trtforge.core.stop_text import overlap

ReasoningParser = Literal["deepseek-r1", "qwen3"]
REASONING_PARSERS: tuple[ReasoningParser, ...] = get_args(ReasoningParser)
THINK, THINK_END = "<think>", "</think>"


class ReasoningText:
    """The text of one answer in, its reasoning and its other text out.

    With `deepseek-r1` an answer begins with reasoning, whose `<think>` is the end of the prompt and may be repeated;
    with `qwen3` only if it begins with `<think>`. White space around the reasoning, and line feeds before the other
    text, are left out. An answer that ends before `</think>` is all reasoning.
    """

    def __init__(self, parser: ReasoningParser) -> None:
        self._reasons = parser == "deepseek-r1"
        self._began = False
        """Whether it is known how the answer begins."""
        self._held = ""
        self._is_first = True
        """Whether what comes is the first of the reasoning, or of the other text."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """New reasoning and new other text; nothing is held back after the `last`."""
        self._held += text
        if not self._began and not self._begins(last=last):
            return "", ""
        reasoning = self._reasoning(last=last) if self._reasons else ""
        if self._reasons:
            return reasoning, ""
        content, self._held = self._held, ""
        if self._is_first:
            content = content.lstrip("\n")
            self._is_first = not content
        return reasoning, content

    def parts(self, text: str, reason: str | None) -> list[tuple[str, str]]:
        """As `HarmonyText.parts`."""
        return [self.push(text, last=reason is not None)]

    def _begins(self, *, last: bool) -> bool:
        """Whether it is known if the answer begins with `<think>`, which is taken away."""
        beginning = self._held.lstrip()
        if beginning.startswith(THINK):
            self._reasons, self._held = True, beginning[len(THINK) :]
        elif THINK.startswith(beginning) and not last:
            return False
        else:
            self._is_first = self._reasons
        self._began = True
        return True

    def _reasoning(self, *, last: bool) -> str:
        """The reasoning that can be told from `</think>` and from white space before it."""
        end = self._held.find(THINK_END)
        if end >= 0:
            found, self._held = self._held[:end].rstrip(), self._held[end + len(THINK_END) :]
            self._reasons = False
        else:
            sure = len(self._held) - (0 if last else overlap(self._held, THINK_END))
            found = self._held[:sure].rstrip()
            self._held = self._held[len(found) :]
        if self._is_first:
            found = found.lstrip()
            self._is_first = not found
        self._is_first = self._is_first or not self._reasons
        return found


Reader = ReasoningText | HarmonyText
"""What tells the reasoning in one answer from its text."""
NewReader = Callable[[], Reader]
"""Makes the reader of an answer."""


def reader_of(parser: ReasoningParser | None, functions: Collection[str] = ()) -> Reader:
    """The reader of the answer to a chat.

    Without a parser an answer in Harmony is recognised by its form; `functions`: whose calls are part of the text.
    """
    return HarmonyText(functions) if parser is None else ReasoningText(parser)
