"""A model's directory holds every module that its code imports: Triton finds no others."""

import ast
from pathlib import Path

import pytest

from trtforge.core.assets import asset_directory
from trtforge.package.repository import LIBRARIES

TEMPLATES = asset_directory("model_repo_templates")
MODULES = {path.stem for path in (TEMPLATES / "lib").glob("*.py")}


def imported(path: Path) -> set[str]:
    """The modules of lib/ that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= set(names) | ({node.module or ""} if isinstance(node, ast.ImportFrom) else set())
    return found & MODULES


@pytest.mark.parametrize(
    ("role", "code", "copied"),
    [(role, code, set(names)) for role, codes in LIBRARIES.items() for code, names in codes.items()],
)
def test_what_a_model_imports_is_beside_it(role: str, code: str, copied: set[str]) -> None:
    files = [TEMPLATES / role / code / "model.py", *(TEMPLATES / "lib" / f"{name}.py" for name in copied)]
    assert set().union(*map(imported, files)) - copied == set()
