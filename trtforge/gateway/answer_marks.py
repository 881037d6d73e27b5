"""Removes the marks that some models write around the text of answers, between calls of functions too.

Command R7B and A write text between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`, Command A+ between `<|START_TEXT|>`
and `<|END_TEXT|>` (tests/tool_parsers/test_cohere_command_tool_parser.py of vLLM), Kimi K3 between
`<|open|>response<|sep|>` and `<|close|>response<|sep|>`, and `<|close|>message<|sep|>` at the end
(models/templates/Kimi-K3.jinja of llama.cpp). functionary 3.2 begins each part with `>>>`, whom it is for (`all`: the
user) and a line feed; its prompts end with the first `>>>` (functionary/prompt_template/llama3_prompt_template_v3.py of
MeetKai/functionary).
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


class PlainReader:
    """The answer that another reader separates, without marks.

    `prompted`: what the prompt ends with, see `prompted_thought`; `functions`: those whose calls functionary's parts
    are. They become `<function=name>` and the arguments.
    """

    def __init__(self, reader: AnswerReader, prompted: str | None, functions: Collection[str]) -> None:
        self._reader = reader
        self._functions = functions
        self._held = ""
        self._read: Callable[[bool], str] = self._beginning
        if prompted == RECIPIENT:
            self._held, self._read = RECIPIENT, self._parts
        elif prompted in _PROMPTED:
            self._read = self._tagged

    def parts(self, text: str, reason: str | None, stop_word: str = "") -> list[tuple[str, str]]:
        """See AnswerReader."""
        told = []
        for reasoning, said in self._reader.parts(text, reason, stop_word):
            self._held += said
            told.append((reasoning, self._read(False)))
        if reason is not None:
            told.append(("", self._read(True)))
        return told

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

    def _plain(self, last: bool) -> str:
        """State: an answer without marks."""
        text, self._held = self._held, ""
        return text

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
