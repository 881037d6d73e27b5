"""A model's directory holds every module that its code imports: Triton finds no others."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtforge.core.assets import asset_directory
from trtforge.package.repository import LIBRARIES, USING_TRTFORGE, own_modules

TEMPLATES = asset_directory("model_repo_templates")
MODULES = {path.stem for path in (TEMPLATES / "lib").glob("*.py")}
CODES = [(role, code, set(names)) for role, codes in LIBRARIES.items() for code, names in codes.items()]


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def files(role: str, code: str, copied: set[str]) -> list[Path]:
    """What is copied into the directory of a model."""
    return [TEMPLATES / role / code / "model.py", *(TEMPLATES / "lib" / f"{name}.py" for name in copied)]


@pytest.mark.parametrize(("role", "code", "copied"), CODES)
def test_what_a_model_imports_is_beside_it(role: str, code: str, copied: set[str]) -> None:
    names = {name for file in files(role, code, copied) for name in imported(file)}
    assert names & MODULES - copied == set()


@pytest.mark.parametrize(("role", "code", "copied"), CODES)
def test_what_it_imports_of_trtforge_is_beside_it_where_that_is_not_installed(
    role: str, code: str, copied: set[str]
) -> None:
    """As in NVIDIA's images: models of a TensorRT engine that Triton does not run, and all models of the LLM API."""
    uses = not USING_TRTFORGE.isdisjoint(copied)
    included = own_modules("tensorrt_llm" if code == "triton" else "llmapi") if uses else {}
    own = [*files(role, code, copied), *included.values()]
    wanted = {name for file in own for name in imported(file) if name.split(".")[0] == "trtforge"}
    held = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in included}
    assert wanted - held == set()


def test_library_modules_are_those_that_models_get() -> None:
    assert {name for _, _, names in CODES for name in names} == MODULES
