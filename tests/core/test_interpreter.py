"""Child interpreters: what they are given to run a module, which is not looked for where the program was started."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trtforge
from trtforge.core import interpreter
from trtforge.core.interpreter import module_arguments, python_interpreter

PACKAGE = Path(trtforge.__file__).parent


@pytest.mark.parametrize("version", [(3, 10), sys.version_info[:2]])
def test_modules_in_the_current_directory_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    for name in ("json", "queue", "logging", "torch", "trtforge"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('found in the current directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interpreter.sys, "version_info", version)
    command = [python_interpreter(), *module_arguments("trtforge"), "version", "--json"]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trtforge"] == trtforge.__version__


def test_a_checkout_that_is_not_installed_runs_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    assert module_arguments("trtforge.gateway") == ("-m", "trtforge.gateway")


def test_named_tuples_have_no_other_base() -> None:
    """Python 3.10 takes none."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and len(node.bases) > 1
        and any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
    ]
    assert found == []
