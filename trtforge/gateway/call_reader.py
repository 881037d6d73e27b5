"""Reads function calls in the streamed text of an answer: each name once it is known, then its arguments.

The formats of calls are in `core/call_forms.py`. A whole answer is read as a stream of one piece.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from trtforge.core.call_forms import (
    ANOTHER,
    ANOTHER_SO_FAR,
    BARE,
    ELEMENT,
    FIRST,
    FURTHER,
    FURTHER_LINE,
    FURTHER_LINE_SO_FAR,
    FURTHER_SO_FAR,
    JSON_BEGINS,
    JSON_TAGS,
    KEYED,
    KEYED_SO_FAR,
    LIST,
    LONGEST_HEAD,
    MARK,
    MARKS,
    NAME_SO_FAR,
    NEXT,
    OBJECT,
    SO_FAR,
    TAGGED,
    CallForm,
    LiteralNotation,
)
from trtforge.core.call_json import calls_in
from trtforge.core.call_tags import LFM_CALLS, LFM_CALLS_END
from trtforge.core.stop_text import overlap
from trtforge.gateway.argument_types import ArgumentTypes
from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.call_stream import CallStream
from trtforge.gateway.json_end import JsonEnd
from trtforge.gateway.literal_arguments import LiteralArguments
from trtforge.gateway.tagged_arguments import TaggedArguments
from trtforge.gateway.tools import ToolUse

_LONGEST_MARK = max(map(len, MARKS))
_MOST_GUESSES = 20
"""The most tags per answer whose JSON is parsed and is not a call; no more are tried, as each takes time."""
_FIRST_SHOWN = re.compile(r"\s*(\S?)")


class CallReader(CallStream):
    """Splits text into text for the user and calls. `begins`: the text begins an answer, all of which may be calls."""

    def __init__(self, use: ToolUse, *, begins: bool = True) -> None:
        super().__init__(use)
        self._read = self._named if use.mode == "named" else self._beginning
        if not begins:
            self._read = self._text
        self._end = JsonEnd()
        self._ended = False  # in mode `named`: the arguments are complete
        self._written: TaggedArguments | LiteralArguments | None = None  # arguments that are not JSON
        self._ignores = False  # these are of a function that is not known
        self._after: Callable[[], bool] = self._text  # the next state after the arguments
        self._in_object = True
        self._closing_tags: Sequence[str] = ()
        self._certain_end = ""
        self._literals: LiteralNotation | None = None
        self._further_head, self._further_so_far = FURTHER, FURTHER_SO_FAR
        self.ignored = False
        """Whether a list had calls of functions that are not known."""
        self._element: list[str] = []  # pieces of an object in an array
        self._whole = JsonEnd()  # of an object that may be a call with its values in any order
        self._guesses = 0
        self._tagged = False  # the latest JSON is between tags, or in an array of calls
        self._told: list[CallDelta] = []  # what `_list` found

    @cached_property
    def _list(self) -> "CallReader":
        """Reads a list that may be the whole answer."""
        return CallReader(replace(self._use, several=True), begins=False)

    def _named(self) -> bool:
        """State: the whole answer is the arguments."""
        if not self.found:
            self._output.begin(self._use.names[0])
        arguments = self._take(len(self._unread))
        if not self._ended:
            _, self._ended = self._end.of(arguments)
        self._output.add(arguments, last=self._last and self._end.closed)
        return False

    def _beginning(self) -> bool:
        """State: the whole answer may be calls, or its beginning."""
        if head := self._known(FIRST.match(self._unread)):
            self._begin(head)
            self._read_json(self._listed if head["mark"] else self._bare)
            return True
        if self._use.mode == "auto" and (head := self._known(BARE.match(self._unread))):
            self._begin(head)
            self._read_json(self._beginning, in_object=False)
            return True
        if before := OBJECT.match(self._unread):
            return self._first_or_next(before.end())
        if self._use.mode == "auto" and not self.found and self._known(LIST.match(self._unread)):
            self._list.push(LFM_CALLS, None)
            self._read = self._whole_list
            return True
        may_be = self._shown_first() in ("", "[") and not (self._use.mode == "auto" and self._has_mark())
        if not self._last and (may_be or self._may_be_named()):
            return self._await_tag()
        if may_be and self._parsed(self._unread):
            self._take(len(self._unread))
        self._read = self._text
        return True

    def _whole_list(self) -> bool:
        """State: a list of calls in Python's notation. It is text if there are other functions or text after it."""
        text = self._take(len(self._unread))
        self._element.append(text)
        told = self._list.push(text + (LFM_CALLS_END if self._last else ""), "stop" if self._last else None)
        new = [each for each in told if isinstance(each, CallDelta)]
        self._told += new
        is_list = len(new) == len(told) and not self._list.ignored
        if is_list and not self._last:
            return False
        text, self._element, self._read = "".join(self._element), [], self._text
        open_ = sum((each.name is not None) - each.last for each in self._told)
        if not is_list or open_ or not text.rstrip().endswith("]"):
            self._push_again(text)
            return False
        for each in self._told:
            if each.name is not None:
                self._output.begin(each.name)
            self._output.add(each.arguments, last=each.last)
        return True

    def _shown_first(self) -> str:
        """The first character that is not white space."""
        found = _FIRST_SHOWN.match(self._unread)
        return found[1] if found else ""

    def _has_mark(self) -> bool:
        found = MARK.search(self._unread, max(0, self._searched - _LONGEST_MARK))
        self._searched = len(self._unread)
        return found is not None

    def _may_be_named(self) -> bool:
        """Whether the answer so far may be the beginning of a function's name and arguments."""
        return self._use.mode == "auto" and self._may_be_of(NAME_SO_FAR)

    def _text(self) -> bool:
        """State: text for the user, up to the next tag."""
        tags = self._use.mode == "auto"
        if tags and (mark := MARK.search(self._unread)):
            self._output.say(self._take(mark.start()))
            self._read = self._tag
            return True
        held = max(overlap(self._unread, mark) for mark in MARKS) if tags and not self._last else 0
        self._output.say(self._take(len(self._unread) - held))
        return False

    def _tag(self) -> bool:
        """State: a tag and the text up to the arguments."""
        for form in TAGGED:
            if head := self._known(form.head.match(self._unread, 0, LONGEST_HEAD)):
                self._begin(head)
                self._read_form(form, head["name"])
                return True
        found = MARK.match(self._unread)
        mark = found[0] if found else ""
        if mark in JSON_TAGS and self._guesses < _MOST_GUESSES and JSON_BEGINS.match(self._unread, len(mark)):
            return self._tagged_json(mark, JSON_TAGS[mark])
        may_be = len(self._unread) <= LONGEST_HEAD and (mark not in SO_FAR or self._may_be_of(SO_FAR[mark], len(mark)))
        if may_be and not self._last:
            return False
        self._no_tag()
        return True

    def _read_form(self, form: CallForm, name: str) -> None:
        self._closing_tags, self._certain_end = form.closing, form.end
        if form.literals is not None:
            self._literals, self._after = form.literals, self._further if form.several else self._closing
            self._further_head, self._further_so_far = (FURTHER, FURTHER_SO_FAR)
            if form.lines:
                self._further_head, self._further_so_far = (FURTHER_LINE, FURTHER_LINE_SO_FAR)
            self._read_literals(name)
        elif form.tags is not None:
            self._written, self._ignores = TaggedArguments(form.tags, self._use.types[name]), False
            self._read, self._after = self._parameters, self._closing
        else:
            self._tagged = True
            after = self._closing if not form.in_object else self._bare
            if form.in_array:
                after = self._keyed if form.keyed else self._listed
            self._read_json(after, in_object=form.in_object)

    def _read_literals(self, name: str) -> None:
        self._ignores = name not in self._use.names
        types = ArgumentTypes({}) if self._ignores else self._use.types[name]
        assert self._literals is not None
        self._written, self._read = LiteralArguments(self._literals, types), self._parameters

    def _tagged_json(self, tag: str, end_tag: str) -> bool:
        """A tag with JSON that does not begin like a call."""
        end = self._unread.find(end_tag, max(len(tag), self._searched - len(end_tag))) if end_tag else -1
        if end < 0 and not self._last:
            self._searched = len(self._unread)
            return self._await_tag(end_tag[-1:] or ">")
        end = len(self._unread) if end < 0 else end
        self._tagged = True
        if self._parsed(self._unread[len(tag) : end]):
            self._take(end)
            self._closing_tags = (end_tag,) if end_tag else ()
            self._read = self._closing
        else:
            self._guesses += 1
            self._no_tag()
        return True

    def _no_tag(self) -> None:
        mark = MARK.match(self._unread)
        self._output.say(self._take(mark.end() if mark else 0))
        self._read = self._text

    def _read_json(self, after: Callable[[], bool], *, in_object: bool = True) -> None:
        self._read, self._after, self._in_object = self._arguments, after, in_object

    def _parameters(self) -> bool:
        """State: arguments that are not JSON."""
        written = self._written
        assert written is not None
        size, arguments = written.of(self._unread, self._reason, self._stop_word)
        self._take(size)
        if not self._ignores:
            self._output.add(arguments, last=written.closed)
        self._awaited = ">" if written.waits else ""
        if written.ended:
            self._read = self._after if written.closed else self._closing
        return written.ended

    def _further(self) -> bool:
        """State after a call in a list of Python: the next call, which is ignored if its function is not known."""
        if head := self._further_head.match(self._unread):
            if self._known(head):
                self._begin(head)
            else:
                self._take(head.end())
                self.ignored = True
            self._read_literals(head["name"])
            return True
        if self._further_so_far.fullmatch(self._unread) and not self._last:
            return False
        self._read = self._closing
        return True

    def _arguments(self) -> bool:
        """State: arguments in JSON."""
        end = self._unread.find(self._certain_end) if self._certain_end else -1
        size, ended = self._end.of(self._unread if end < 0 else self._unread[:end])
        ended = ended or end >= 0
        self._output.add(self._take(size), last=self._end.closed)
        if ended:
            self._end, self._certain_end = JsonEnd(depth=1), ""
            self._read = self._rest_of_call if self._in_object else self._after
        return ended

    def _rest_of_call(self) -> bool:
        """State: the rest of a call's object after the arguments, which is ignored."""
        size, ended = self._end.of(self._unread)
        self._take(size)
        if ended:
            self._read = self._after
        return ended

    def _closing(self) -> bool:
        """State: the closing tags, in their order."""
        while self._closing_tags:
            ahead = self._unread.lstrip()
            tag = self._closing_tags[0]
            if tag.startswith(ahead) and ahead != tag and not self._last:
                return False
            if ahead.startswith(tag):
                self._take(len(self._unread) - len(ahead) + len(tag))
            self._closing_tags = self._closing_tags[1:]
        self._read = self._text
        return True

    def _bare(self) -> bool:
        """State after a call in an object: another call (Llama 3.1 writes `;` between them), else what ends them."""
        head = self._known(NEXT.match(self._unread))
        if head and head["mark"] in ("", ";"):
            self._begin(head)
            self._read_json(self._bare)
            return True
        if before := ANOTHER.match(self._unread):
            return self._first_or_next(before.end())
        if ANOTHER_SO_FAR.fullmatch(self._unread) and not self._last:
            return False
        self._read = self._closing
        return True

    def _first_or_next(self, start: int) -> bool:
        """An object from `start` on: a call with its values in any order, else the text begins."""
        searched = max(self._searched, start)
        size, ended = self._whole.of(self._unread[searched:])
        self._searched = searched + size
        if not ended and not self._last:
            self._awaited = "}" if len(self._unread) > LONGEST_HEAD else ""
            return False
        if self._whole.closed and self._parsed(self._unread[start : self._searched]):
            self._take(self._searched)
            self._read = self._bare
        else:
            self._searched, self._read = 0, self._text
        self._whole = JsonEnd()
        return True

    def _listed(self) -> bool:
        """State after a call in an array: the next call, or another object, which may also be a call.

        After an array in tags, text follows; anything after an array that is the whole answer is ignored.
        """
        between_tags = bool(self._closing_tags)
        otherwise = self._closing if between_tags else self._ignored
        element = ELEMENT.match(self._unread)
        if element is None or self._known(NEXT.match(self._unread)):
            return self._follows(otherwise, (",", "") if between_tags else (",",))
        _, ended = JsonEnd().of(self._unread[element.end() : LONGEST_HEAD])
        if not ended and len(self._unread) <= LONGEST_HEAD and not self._last:
            return False
        self._take(element.end())
        self._end, self._element, self._read = JsonEnd(), [], self._object
        return True

    def _keyed(self) -> bool:
        """State after an object whose key is the name of a function: the next one, else what ends the array."""
        if head := self._known(KEYED.match(self._unread)):
            self._begin(head)
            self._read = self._arguments
            return True
        if KEYED_SO_FAR.fullmatch(self._unread) and not self._last:
            return False
        self._read = self._closing
        return True

    def _object(self) -> bool:
        """State: an object in an array."""
        size, ended = self._end.of(self._unread)
        self._element.append(self._take(size))
        if ended or self._last:
            element, self._element, self._tagged = "".join(self._element), [], True
            if not self._parsed(element) and self._closing_tags:
                self._output.say(element)
            self._read = self._listed if ended else self._text
        return ended

    def _follows(self, otherwise: Callable[[], bool], marks: Sequence[str]) -> bool:
        head = self._known(NEXT.match(self._unread))
        if head and head["mark"] in marks:
            self._begin(head)
            self._read = self._arguments
            return True
        ahead = self._unread.lstrip()
        if ahead[:1] in ("", "{", *marks) and len(self._unread) <= LONGEST_HEAD and not self._last:
            return False
        self._read = otherwise
        return True

    def _ignored(self) -> bool:
        self._take(len(self._unread))
        return False

    def _parsed(self, text: str) -> bool:
        """Add the calls in a complete JSON text, whose arguments need not come last; returns whether there are any."""
        calls = calls_in(self._use.names, text, tagged=self._tagged)
        for name, arguments in calls:
            self._output.begin(name)
            self._output.add(arguments, last=True)
        return bool(calls)

    def _begin(self, head: "re.Match[str]") -> None:
        """Begin a call whose arguments follow."""
        self._take(head.end())
        self._end, self._whole = JsonEnd(), JsonEnd()
        self._output.begin(head["name"])
