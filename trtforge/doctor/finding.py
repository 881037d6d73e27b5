"""The result of one check: status, finding and advice."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trtforge.core.figures import ROUNDED_UP

Status = Literal["ok", "warning", "problem", "unknown"]

_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Finding:
    """The result of one check. `found`: the state of the machine; `todo`: what to do about it, may be empty.

    `status` depends on the needs: a missing GPU is a problem only for an engine on a GPU.
    """

    name: str
    status: Status
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Report:
    """All findings about a machine. `recipe` None: judged for the embedded engine in general."""

    recipe: str | None
    findings: Sequence[Finding]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings with status "problem"."""
        return tuple(finding for finding in self.findings if finding.status == "problem")

    def as_json(self) -> dict[str, Any]:
        """The output of --json."""
        return {
            "recipe": self.recipe,
            "fit": not self.problems,
            "findings": [asdict(finding) for finding in self.findings],
        }


def gib(count: float) -> str:
    """Bytes as text: 80 GiB, 79.6 GiB, 320 MiB."""
    value, unit = (count / _GIB, "GiB") if count >= _GIB else (count / _MIB, "MiB")
    return f"{value:.3g} {unit}" if value < ROUNDED_UP else f"{value:.0f} {unit}"
