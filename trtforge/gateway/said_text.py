"""The text of an answer outside of calls."""


class SaidText:
    """Text around calls, without white space before the first call, between calls and after the last one."""

    def __init__(self) -> None:
        self._ready = ""
        self._before = ""  # white space that ended the text before the latest calls
        self._blank = ""  # white space that ends the text since then
        self._says = self._calls = False

    def add(self, text: str) -> None:
        """Add text of this part."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._ready += self._before + shown
            self._before, self._says = "", True

    def end_part(self) -> None:
        """End the part, as a call begins."""
        if self._says:
            self._before = self._blank
        self._blank, self._says, self._calls = "", False, True

    def taken(self, *, last: bool) -> str:
        """Take the text that can be shown. `last`: also the remaining white space, unless there were calls."""
        if last and not self._calls:
            self._ready += self._blank
            self._blank = ""
        ready, self._ready = self._ready, ""
        return ready
