"""Removes the marks that some models write around the text of answers, between calls of functions too.

Command R7B and A write text between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`, Command A+ between `<|START_TEXT|>`
and `<|END_TEXT|>` (tests/tool_parsers/test_cohere_command_tool_parser.py of vLLM), Kimi K3 between
`<|open|>response<|sep|>` and `<|close|>response<|sep|>`, and `<|close|>message<|sep|>` at the end
(models/templates/Kimi-K3.jinja of llama.cpp). functionary 3.2 begins each part with `>>>`, whom it is for (`all`: the
user) and a line feed; its prompts end with the first `>>>` (functionary/prompt_template/llama3_prompt_template_v3.py of
MeetKai/functionary).

After reasoning, Hunyuan A13B writes its answer between `<answer>` and `</answer>`, ERNIE 4.5 Thinking between
`<response>` and `</response>` (hunyuan_a13b_reasoning_parser.py and ernie45_reasoning_parser.py in vllm/reasoning).
Users ask other models for such tags: then they are text.
"""

import re
from collections.abc import Callable, Collection

from trtforge.core.call_tags import (
    ACTION,
    COHERE_THINKING,
    FUNCTION,
    RECIPIENT,
    XTML_CALLS,
    XTML_CLOSE,
    XTML_END,
    XTML_RESPONSE,
    XTML_RESPONSE_END,
    XTML_THINK,
)
from trtforge.core.reasoning import ReasoningText
from trtforge.core.stop_text import overlap
from trtforge.gateway.sequence import AnswerReader

_TAGS = (
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    XTML_RESPONSE,
    XTML_RESPONSE_END,
    f"{XTML_CLOSE}message{XTML_END}",
)
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_BEGIN = (*_TAGS, COHERE_THINKING, ACTION, XTML_THINK, XTML_CALLS)
_PROMPTED = (COHERE_THINKING, XTML_THINK, XTML_RESPONSE)
"""Ends of prompts of Command and Kimi K3."""
_PART = re.compile(rf"{RECIPIENT}(?P<to>[A-Za-z0-9_-]{{1,64}})\n")
_PART_SO_FAR = re.compile(rf"{RECIPIENT}[A-Za-z0-9_-]{{0,64}}\Z")
_USER = "all"
_ANSWERS = {"<answer>": "</answer>", "<response>": "</response>"}
_ENDS = {end: re.compile(rf"\n?{end}\s{{0,99}}\Z") for end in _ANSWERS.values()}


class _Filter:
    """Changes the text that another reader separates from reasoning. Subclasses have states, which take `_held`."""

    _read: Callable[[bool], str]

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._held = ""

    def parts(self, text: str, reason: str | None, stop_word: str = "") -> list[tuple[str, str]]:
        """See AnswerReader."""
        told = []
        for reasoning, said in self._reader.parts(text, reason, stop_word):
            self._held += said
            told.append((reasoning, self._read(False)))
        if reason is not None:
            told.append(("", self._read(True)))
        return told

    def _plain(self, last: bool) -> str:
        """State: text without marks."""
        text, self._held = self._held, ""
        return text


class AnswerTags(_Filter):
    """The answer that another reader separates, without tags around all of its text after reasoning.

    `thought`: separates the reasoning; `asked`: the conversation, whose own tags stay in the answer.
    """

    def __init__(self, reader: AnswerReader, thought: ReasoningText, asked: str) -> None:
        super().__init__(reader)
        self._thought = thought
        self._tags = {begin: end for begin, end in _ANSWERS.items() if begin not in asked}
        self._end = ""
        self._read = self._beginning

    def _beginning(self, last: bool) -> str:
        """State: the text may begin with a tag."""
        ahead = self._held.lstrip()
        begin = next((begin for begin in self._tags if ahead.startswith(begin)), None)
        if self._held and not self._thought.closed:
            self._read = self._plain
        elif begin is not None:
            self._held, self._end, self._read = ahead[len(begin) :], self._tags[begin], self._tagged_beginning
        elif last or not any(begin.startswith(ahead) for begin in self._tags):
            self._read = self._plain
        else:
            return ""
        return self._read(last)

    def _tagged_beginning(self, last: bool) -> str:
        """State: line feeds after the opening tag."""
        self._held = self._held.lstrip("\n")
        if not self._held:
            return ""
        self._read = self._tagged
        return self._read(last)

    def _tagged(self, last: bool) -> str:
        """State: text, which may end with the closing tag."""
        found = _ENDS[self._end].search(self._held)
        size = found.start() if found else len(self._held)
        if found is None and not last:
            size -= max(overlap(self._held, self._end), overlap(self._held, f"\n{self._end}"))
        text, self._held = self._held[:size], self._held[size:]
        return text


class PlainReader(_Filter):
    """The answer that another reader separates, without marks.

    `prompted`: what the prompt ends with, see `prompted_thought`; `functions`: those whose calls functionary's parts
    are. They become `<function=name>` and the arguments.
    """

    def __init__(self, reader: AnswerReader, prompted: str | None, functions: Collection[str]) -> None:
        super().__init__(reader)
        self._functions = functions
        self._read = self._beginning
        if prompted == RECIPIENT:
            self._held, self._read = RECIPIENT, self._parts
        elif prompted in _PROMPTED:
            self._read = self._tagged

    def _beginning(self, last: bool) -> str:
        """State: the answer may begin with a tag of Command or Kimi K3."""
        ahead = self._held.lstrip()
        if ahead.startswith(_BEGIN):
            self._read = self._tagged
        elif last or not any(tag.startswith(ahead) for tag in _BEGIN):
            self._read = self._plain
        else:
            return ""
        return self._read(last)

    def _tagged(self, last: bool) -> str:
        """State: an answer of Command or Kimi K3."""
        text, rest = _replaced(_TAG, "", self._held)
        held = 0 if last else max(overlap(rest, tag) for tag in _TAGS)
        self._held = rest[len(rest) - held :]
        return text + rest[: len(rest) - held]

    def _parts(self, last: bool) -> str:
        """State: an answer of functionary."""
        text, rest = _replaced(_PART, self._begun, self._held)
        so_far = _PART_SO_FAR.search(rest)
        held = 0 if last else len(so_far[0]) if so_far else overlap(rest, RECIPIENT)
        self._held = rest[len(rest) - held :]
        return text + rest[: len(rest) - held]

    def _begun(self, part: "re.Match[str]") -> str:
        """What the beginning of a part becomes."""
        if part["to"] in self._functions:
            return f"{FUNCTION}{part['to']}>"
        return "" if part["to"] == _USER else part[0]


def _replaced(pattern: "re.Pattern[str]", by: "str | Callable[[re.Match[str]], str]", text: str) -> tuple[str, str]:
    """The text up to the last match, with each match replaced, and the rest; what a replacement joins is no match."""
    end = max((found.end() for found in pattern.finditer(text)), default=0)
    return pattern.sub(by, text[:end]), text[end:]
