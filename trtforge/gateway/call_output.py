"""What a reader has found in an answer, in its order: text for the user, and the calls as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtforge.gateway.said_text import SaidText


@dataclass(frozen=True)
class CallDelta:
    """New data of the call number `index` of its answer.

    `name`: in its first delta; `arguments`: further JSON text; `last`: the arguments are complete. A call without a
    last delta was cut, or its arguments are not JSON.
    """

    index: int
    arguments: str = ""
    name: str | None = None
    last: bool = False


class CallOutput:
    """Collects what is told. `several`: more than one call is told, otherwise the first one only."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._said = SaidText()
        self._texts: list[str] = []  # since the latest call
        self._call: CallDelta | None = None  # the latest one, without its new arguments
        self._arguments: list[str] = []  # new ones of the latest call
        self._told: list[str | CallDelta] = []
        self.count = 0
        """Number of calls in the answer."""
        self.cut = False
        """Whether the latest call has no end."""

    def say(self, text: str) -> None:
        """Add text for the user."""
        self._said.add(text)
        self._texts.append(self._said.taken(last=False))

    def skip(self, text: str) -> None:
        """Add text that precedes all that is said."""
        self._said.add(text)

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._said.end_part()
        self._texts.append(self._said.taken(last=False))
        self._close()
        self.count += 1
        if self._wanted:
            self.cut = True
            self._call = CallDelta(self.count - 1, name=name)

    def add(self, arguments: str, *, last: bool) -> None:
        """Add arguments of the latest call. `last`: they are complete."""
        if not self._wanted:
            return
        self.cut = not last
        if self._call is None and (arguments or last):
            self._close()
            self._call = CallDelta(self.count - 1)
        if self._call is not None:
            self._arguments.append(arguments)
            self._call = replace(self._call, last=last)

    def take(self, *, last: bool) -> Sequence[str | CallDelta]:
        """Take what is new. `last`: also the white space with which an answer without calls ends."""
        self._texts.append(self._said.taken(last=last))
        self._close()
        told, self._told = self._told, []
        return told

    def _close(self) -> None:
        """Complete the parts that are collected: a call, and the text after it."""
        if self._call is not None:
            self._told.append(replace(self._call, arguments="".join(self._arguments)))
            self._call, self._arguments = None, []
        if text := "".join(self._texts):
            self._told.append(text)
        self._texts = []

    @property
    def _wanted(self) -> bool:
        return self._several or self.count == 1
