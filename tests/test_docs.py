"""The documentation says what the code says: generated parts, quoted lines and messages, paths, the version."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs_cli import command_names
from tests.docs_tables import DOCS, TABLES, with_table
from tests.test_layering import FLOORS
from trtforge import __version__

ROOT = DOCS.parent
PACKAGES = tuple(path.parent.name for path in (ROOT / "trtforge").glob("*/__init__.py"))
PAGES_OF_PATHS = (ROOT / "CONTRIBUTING.md", DOCS / "architecture.md", DOCS / "extending.md")


@pytest.mark.parametrize("name", TABLES)
def test_generated_parts_are_those_of_the_code(name: str) -> None:
    text = (DOCS / name).read_text()
    for marker, table in TABLES[name]:
        assert f"<!-- {marker} -->" in text
        assert with_table(text, marker, table()) == text, f"docs/{name}: run python -m tests.docs_tables"


def test_the_readme_counts_the_architectures() -> None:
    table = (DOCS / "formats.md").read_text().partition("<!-- families -->")[2].partition("<!-- end -->")[0]
    rows = [row.split(" | ")[3] for row in table.strip().splitlines()[2:]]
    counts = re.search(
        r"(\d+) architectures convert for engines.*?; (\d+)\s+more", (ROOT / "README.md").read_text(), re.S
    )
    assert counts is not None
    without = rows.count("–")
    assert (int(counts[1]), int(counts[2])) == (len(rows) - without, without)


def test_every_command_is_in_the_reference() -> None:
    headings = re.findall(r"^### trtforge (.+)$", (DOCS / "cli.md").read_text(), re.M)
    assert set(command_names()) <= set(headings)


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first[1] == __version__


def test_commands_have_the_options_that_pages_give_them() -> None:
    options = {
        heading: set(re.findall(r"`(--[\w-]+)`", body))
        for heading, body in re.findall(
            r"^### trtforge (.+?)\n(.*?)(?=^##|\Z)", (DOCS / "cli.md").read_text(), re.M | re.S
        )
    }
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for line in re.findall(r"(?<![\w/-])trtforge (?!-)([^`\n|;#]+)", page.read_text()):
            words = line.split()
            command = " ".join(words[:2]) if " ".join(words[:2]) in options else words[0]
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", line) if command in options else ():
                assert option in options[command] | {"--help"}, f"{page.name}: trtforge {line}"


def test_the_quickstart_has_the_figures_of_the_plan() -> None:
    command = [sys.executable, "-m", "trtforge", "plan", "llama-3.1-8b-fp8"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = (DOCS / "quickstart-gpu.md").read_text()
    for label in ("total", "weights"):
        figure = re.search(rf"^  {label} +([\d.]+ GB)", planned, re.M)
        assert figure is not None
        assert figure[1] in page
    build = re.search(r"engine build: .* and ([\d.]+ GB) of host memory", planned)
    assert build is not None
    assert build[1] in page


@pytest.mark.parametrize("page", PAGES_OF_PATHS, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    """`models/registry.py` is below trtforge/, `tests/families.py` below the repository."""
    for path in re.findall(r"`([\w.*/-]+)`", page.read_text()):
        top = path.partition("/")[0]
        if "/" in path and top in (*PACKAGES, "trtforge", "tests", "docs", "recipes", "model_repo_templates"):
            base = ROOT / "trtforge" if top in PACKAGES else ROOT
            # a file may be named without its ending, a new one is made by the reader
            assert any((*base.glob(path), *base.glob(f"{path}.py"))) or "birch" in path, f"{page.name}: {path}"


def quoted_lines() -> Iterator[tuple[str, str]]:
    """The lines of docs/extending.md that stand below "In `FILE`:"."""
    for path, block in re.findall(r"In `([\w./-]+)`:\n\n```\w*\n(.*?)```", (DOCS / "extending.md").read_text(), re.S):
        yield from ((path, line.strip()) for line in block.splitlines() if line.strip() not in ("", "..."))


def test_quoted_lines_stand_in_their_files() -> None:
    quoted = list(quoted_lines())
    assert quoted
    for path, line in quoted:
        assert line in [each.strip() for each in (ROOT / path).read_text().splitlines()], f"{path}: {line}"


@cache
def messages() -> tuple[str, ...]:
    """Every text of trtforge's own code, an ellipsis where a value is put in."""
    found = []
    for path in (ROOT / "trtforge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def symptoms() -> list[str]:
    """What docs/troubleshooting.md quotes in the first column of the tables that are written by hand."""
    text = re.sub(r"<!-- log-.*?<!-- end -->", "", (DOCS / "troubleshooting.md").read_text(), flags=re.S)
    return re.findall(r"^\| `error: (.+?)` \|", text, re.M)


@pytest.mark.parametrize("symptom", symptoms())
def test_quoted_errors_are_those_of_the_program(symptom: str) -> None:
    """An ellipsis of the page stands for anything."""
    wanted = re.compile(".*".join(re.escape(part) for part in symptom.split("\N{HORIZONTAL ELLIPSIS}")), re.S)
    assert any(wanted.search(message) for message in messages()), f"no error of trtforge: {symptom}"


def test_the_floors_of_the_page_are_those_of_the_layering() -> None:
    rows = re.findall(r"^\| (\d) \| `(\w+)` \|", (DOCS / "architecture.md").read_text(), re.M)
    assert {package: int(floor) for floor, package in rows} == FLOORS
