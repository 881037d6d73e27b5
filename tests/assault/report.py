"""What an attack found: rows of figures, and checks that hold or do not."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

Figure = str | int | float


@dataclass(frozen=True)
class Check:
    """One thing that must hold. `seen`: what was seen, to be read when it does not."""

    what: str
    passed: bool
    seen: str = ""


@dataclass
class Report:
    """The result of one attack."""

    name: str
    rows: list[Mapping[str, Figure]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, what: str, passed: bool, seen: object = "") -> bool:
        """Record one check; whether it passed."""
        self.checks.append(Check(what, bool(passed), str(seen)))
        return bool(passed)

    @property
    def failures(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether there were checks and all of them hold."""
        return bool(self.checks) and not self.failures

    def as_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps({"passed": self.passed, **asdict(self)})

    def show(self, console: Console) -> None:
        """Print the figures as a table, then every failed check, then the verdict."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        if columns:
            table = Table(title=self.name, title_justify="left")
            for name in columns:
                table.add_column(name, justify="left" if name == columns[0] else "right")
            for row in self.rows:
                table.add_row(*(shown(row.get(name, "")) for name in columns))
            console.print(table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)
        for check in self.failures:
            console.print(f"FAILED {check.what}: {check.seen}", markup=False, highlight=False)
        verdict = "passed" if self.passed else "failed"
        console.print(f"{self.name}: {verdict}, {len(self.checks)} checks, {len(self.failures)} failed", markup=False)

    def markdown(self) -> str:
        """The rows as a Markdown table."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(shown(row.get(name, "")) for name in columns) + " |" for row in self.rows]
        return "\n".join(lines)


def shown(figure: Figure) -> str:
    """A figure as tables have it."""
    return f"{figure:.2f}" if isinstance(figure, float) else str(figure)
