"""Where an object ends in JSON that comes in pieces."""

import re

_STOPS = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Follows the brackets and strings of one object. `depth`: how many of its brackets are open before the text.

    `closed`: the last bracket was found. It does not tell whether all between is JSON.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False
        self.closed = False

    def of(self, text: str) -> tuple[int, bool]:
        """How many characters of the following text belong to the object, and whether it ends there.

        A `<` outside of strings, with which no JSON can go on, ends it too, before it.
        """
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while found := (_IN_STRING if self._in_string else _STOPS).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "<":
                    return found.start(), True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        self.closed = True
                        return at, True
        return len(text), False
