"""Finds the end of an object in JSON that arrives in pieces."""

import re

_STOPS = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Tracks the brackets and strings of one object. `depth`: number of brackets that are open before the text.

    `closed`: the last bracket was found; the text before it need not be valid JSON.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False
        self.closed = False

    def of(self, text: str) -> tuple[int, bool]:
        """The number of characters of the next text that belong to the object, and whether it ends there.

        A `<` outside of strings, which is never valid JSON, also ends the object, before the `<`.
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
