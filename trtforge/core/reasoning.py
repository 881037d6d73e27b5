"""Separates the reasoning that a model writes before its answer, between `<think>` and `</think>`, from the answer.

Mistral's models write `[THINK]` and `[/THINK]`, Seed-OSS `<seed:think>` and `</seed:think>`, Command R7B and A
`<|START_THINKING|>` and `<|END_THINKING|>`, Gemma 4 `<|channel>thought` and `<channel|>`, Kimi K3
`<|open|>think<|sep|>` and `<|close|>think<|sep|>`, Apertus `<|inner_prefix|>` and `<|inner_suffix|>`.

The names are those of `trtllm-serve --reasoning_parser` (tensorrt_llm/llmapi/reasoning_parser.py).
"""

from collections.abc import Callable, Collection
from typing import Literal, get_args

from trtforge.core import mistral_tokens
from trtforge.core.call_tags import (
    COHERE_THINKING,
    COHERE_THINKING_END,
    GEMMA_CHANNEL,
    GEMMA_CHANNEL_END,
    RECIPIENT,
    XTML_RESPONSE,
    XTML_THINK,
    XTML_THINK_END,
)
from trtforge.core.harmony import HarmonyText
from trtforge.core.stop_text import overlap

ReasoningParser = Literal["deepseek-r1", "qwen3"]
REASONING_PARSERS: tuple[ReasoningParser, ...] = get_args(ReasoningParser)
THOUGHTS = (
    ("<think>", "</think>"),
    (mistral_tokens.THINK, mistral_tokens.THINK_END),
    ("<seed:think>", "</seed:think>"),
    (COHERE_THINKING, COHERE_THINKING_END),
    (f"{GEMMA_CHANNEL}thought", GEMMA_CHANNEL_END),
    (XTML_THINK, XTML_THINK_END),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Pairs of opening and closing tags of reasoning."""


class ReasoningText:
    """Splits the text of one answer into reasoning and other text.

    `before`: what the answer continues: the text of the final message if the request says so, otherwise the
    `prompted_thought` of the prompt. The answer begins with reasoning if that text ends within reasoning, or if the
    answer begins with `<think>`. If `before` is None, the prompt is not known: then each answer begins with reasoning
    with `deepseek-r1`, and with `qwen3` only one that begins with `<think>`. A `<think>` with which the prompt ends may
    be repeated. White space around the reasoning and line feeds before the other text are removed. An answer that ends
    before `</think>` is all reasoning.
    """

    def __init__(self, parser: ReasoningParser, before: str | None = None) -> None:
        begun = None if before is None else unclosed_thought(before)
        self._reasons = parser == "deepseek-r1" if before is None else begun is not None
        self._end = (THOUGHTS[0] if begun is None else begun[1])[1]
        self._began = begun is not None and bool(begun[0].strip())
        """Whether it is known how the answer begins."""
        self._held = ""
        self._is_first = not self._began
        """Whether the next text is the first of the reasoning or of the other text."""
        self.closed = False
        """Whether reasoning has ended in this answer."""

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reasons

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take a piece; returns new reasoning and new other text. Nothing is held back after the `last` piece."""
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

    def parts(self, text: str, reason: str | None, stop_word: str = "") -> list[tuple[str, str]]:
        """Like `HarmonyText.parts`."""
        return [self.push(text, last=reason is not None)]

    def _begins(self, *, last: bool) -> bool:
        """Remove a leading `<think>`; returns False if more text is needed to decide."""
        beginning = self._held.lstrip()
        tags = begun_thought(beginning)
        if tags is not None:
            self._reasons, self._held, self._end = True, beginning[len(tags[0]) :], tags[1]
        elif may_begin_thought(beginning) and not last:
            return False
        else:
            self._is_first = self._reasons
        self._began = True
        return True

    def _reasoning(self, *, last: bool) -> str:
        """The reasoning that is certainly not part of `</think>` or of white space before it."""
        end = self._held.find(self._end)
        if end >= 0:
            found, self._held = self._held[:end].rstrip(), self._held[end + len(self._end) :]
            self._reasons, self.closed = False, True
        else:
            sure = len(self._held) - (0 if last else overlap(self._held, self._end))
            found = self._held[:sure].rstrip()
            self._held = self._held[len(found) :]
        if self._is_first:
            found = found.lstrip()
            self._is_first = not found
        self._is_first = self._is_first or not self._reasons
        return found


def begun_thought(text: str) -> tuple[str, str] | None:
    """The tags of the reasoning at the beginning of a text; None without."""
    return next((tags for tags in THOUGHTS if text.startswith(tags[0])), None)


def unclosed_thought(text: str) -> tuple[str, tuple[str, str]] | None:
    """The reasoning within which a text ends, so far, and its tags; None if it does not end within reasoning."""
    for begin, end in THOUGHTS:
        if text.rfind(begin) > text.rfind(end):
            return text.rpartition(begin)[2], (begin, end)
    return None


def prompted_thought(prompt: str) -> str:
    """The opening tag of reasoning with which a prompt ends, apart from white space; "" if it ends otherwise.

    Also functionary's mark, after which the model writes whom the answer is for, and the tag of Kimi K3's answers.
    """
    end = prompt.rstrip()
    marks = (*(tags[0] for tags in THOUGHTS), RECIPIENT, XTML_RESPONSE)
    return next((begin for begin in marks if end.endswith(begin)), "")


def may_begin_thought(text: str) -> bool:
    """Whether a text may become an opening tag of reasoning."""
    return any(begin.startswith(text) for begin, _ in THOUGHTS)


Reader = ReasoningText | HarmonyText
"""Separates the reasoning in one answer from its text."""
NewReader = Callable[[str | None], Reader]
"""Creates the reader of an answer. The argument: the `prompted_thought` of its prompt, None if it is not known."""


def reader_of(parser: ReasoningParser | None, functions: Collection[str] = (), before: str | None = None) -> Reader:
    """The reader of the answer to a chat. `before`: see ReasoningText.

    Without a parser, answers in the Harmony format are recognised; `functions`: those whose calls are part of the text.
    """
    return HarmonyText(functions) if parser is None else ReasoningText(parser, before)
