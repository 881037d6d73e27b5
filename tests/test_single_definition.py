"""Each fact is defined once: choices of a Literal, named constants, limits of number formats, the default release."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from trtforge.core import number_limits
from trtforge.core.recipe import TargetConfig

ROOT = Path(__file__).parent.parent / "trtforge"
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
TUNED_BY_EACH_MODULE = {"POLL", "PATIENCE", "SHOWN"}
"""Periods, patience and lengths of messages: equal values there are a coincidence."""
TWO_MEANINGS = {
    "config.json": "of a Hugging Face checkpoint and of a TensorRT-LLM checkpoint",
    "engine": "a rank's output while it is built, and the engine's directory in a repository",
}
"""Texts that two constants may share."""


def constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Names (without leading underscores) and values of a module's upper-case constants that are plain values."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id.lstrip("_").isupper() and isinstance(value, ast.expr):
            try:
                yield target.id.lstrip("_"), ast.literal_eval(value)
            except ValueError:
                continue


def numbers_and_texts(tree: ast.Module) -> Iterator[object]:
    """Every number and text in the code, docstrings aside."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node.value


def repeated(found: dict[object, list[str]]) -> dict[object, list[str]]:
    return {fact: places for fact, places in found.items() if len(places) > 1}


def test_choices_are_listed_once() -> None:
    found: dict[object, list[str]] = defaultdict(list)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
                members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                values = frozenset(member.value for member in members if isinstance(member, ast.Constant))
                if len(values) > 1:
                    found[values].append(f"{module}:{node.lineno}")
    assert repeated(found) == {}


def test_constants_are_defined_once() -> None:
    found: dict[object, list[str]] = defaultdict(list)
    for module, tree in TREES.items():
        for name, value in constants(tree):
            if name not in TUNED_BY_EACH_MODULE:
                found[name, repr(value)].append(module)
    assert repeated(found) == {}


def test_texts_are_named_once() -> None:
    found: dict[object, list[str]] = defaultdict(list)
    for module, tree in TREES.items():
        for name, value in constants(tree):
            if isinstance(value, str) and value not in TWO_MEANINGS:
                found[value].append(f"{module}: {name}")
    assert repeated(found) == {}


def test_limits_of_number_formats_stand_in_one_module() -> None:
    limits = {value for _, value in constants(TREES["core/number_limits.py"]) if isinstance(value, float)}
    assert limits == {number_limits.FP8_MAX, number_limits.INT8_MAX, number_limits.E2M1_MAX}
    distinctive = {number_limits.FP8_MAX, number_limits.INT8_MAX}  # 6.0 is a common number
    found = {
        module: value
        for module, tree in TREES.items()
        for value in numbers_and_texts(tree)
        if isinstance(value, float) and value in distinctive and module != "core/number_limits.py"
    }
    assert found == {}


def test_the_default_release_stands_once() -> None:
    default = TargetConfig().tensorrt_llm
    found = [module for module, tree in TREES.items() for value in numbers_and_texts(tree) if value == default]
    assert found == ["core/defaults.py"]
