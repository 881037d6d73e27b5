"""A known log message: how to recognise it, what it means and what to do first."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trtforge.doctor.log_lines import Level

Kind = Literal["cause", "effect", "warning", "harmless"]
"""`effect`: follows from another error, so it is the diagnosis only if no cause is found. `warning`: worth knowing, not
an error. `harmless`: looks like an error but is not one."""

_LONGEST = 400  # characters of a value


@dataclass(frozen=True)
class Pattern:
    """One message. `means` and `do` are filled with the named groups of `regex` and `then`.

    Repetitions of `.` are bounded in both, because they are tried from every position of a long line.

    `then`: a second expression for more of the message on the same or the next lines of that rank. `inside`: the
    message counts only after a Python trace with a matching line. `noise_as_warning`: the message is harmless if logged
    as a warning. `sources`: explanations of the message, or the code that writes it.
    """

    id: str
    title: str
    regex: str
    means: str
    do: str
    sources: tuple[str, ...]
    kind: Kind = "cause"
    then: str | None = None
    inside: str | None = None
    noise_as_warning: bool = False

    def search(self, text: str) -> dict[str, str] | None:
        """The values of the message in `text`; None if it does not match."""
        match = self._regex.search(text)
        return None if match is None else _values(match)

    def search_on(self, text: str) -> dict[str, str]:
        """The values that `then` finds in `text`, if any."""
        match = self._then.search(text) if self._then is not None else None
        return {} if match is None else _values(match)

    def is_frame(self, text: str) -> bool:
        """Whether `text` is the line of a Python trace that `inside` requires."""
        return self._inside is not None and self._inside.search(text) is not None

    def kind_at(self, level: Level | None) -> Kind:
        """The kind on a line of this level: a program that only warns continues."""
        if level == "warning" and self.kind in ("cause", "effect"):
            return "harmless" if self.noise_as_warning else "warning"
        return self.kind

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.regex)

    @cached_property
    def _then(self) -> re.Pattern[str] | None:
        return None if self.then is None else re.compile(self.then)

    @cached_property
    def _inside(self) -> re.Pattern[str] | None:
        return None if self.inside is None else re.compile(self.inside)


def filled(template: str, values: Mapping[str, str]) -> str:
    """`template` with its values; a question mark for each missing one."""
    return template.format_map(defaultdict(lambda: "?", values))


def _values(match: re.Match[str]) -> dict[str, str]:
    return {name: value[:_LONGEST] for name, value in match.groupdict().items() if value is not None}
