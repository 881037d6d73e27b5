"""Messages name commands and options that exist, in the words of the command that was run."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import trtforge
from trtforge.cli.app import app, options_of
from trtforge.cli.hints import _KEYS, for_command, repaired
from trtforge.core.assets import asset_directory
from trtforge.core.errors import Repair
from trtforge.core.recipe import Recipe

PACKAGE = Path(trtforge.__file__).parent
SOURCES = [*sorted(PACKAGE.rglob("*.py")), *sorted(asset_directory("model_repo_templates").rglob("*.py"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w=-]*_)")
COMMAND = re.compile(r"`trtforge ([a-z][^`]*)`")
FOREIGN = {
    *("--gpus", "--shm-size", "--runtime", "--ulimit"),  # docker
    *("--tag-output", "--timestamp-output", "--version", "--allow-run-as-root"),  # mpirun
    *("--backend-config", "--log-format", "--http-restricted-api", "--grpc-restricted-protocol"),  # tritonserver
    *("--timestamps", "--type", "--from-file", "--for"),  # kubectl
    *(
        "--build-context",
        "--mount",
        "--yes",
        "--no-install-recommends",
        "--no-cache-dir",
    ),  # Dockerfiles: docker, apt, pip
    *("--uid", "--create-home", "--no-deps", "--wheel-dir"),  # useradd; pip wheel
    *("--port", "--upstream", "--host", "--open", "--api-key-file"),  # trtforge.serve.front and serve
}


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that have words: no docstrings, no bare options. Values of f-strings are X."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | docs:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    group = group or typer.main.get_command(app)
    for name, command in getattr(group, "commands", {}).items():
        yield (*words, name)
        yield from commands(command, (*words, name))


EVERY = {words: options_of(words) for words in commands()}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(path.parents[2])))
def test_named_commands_have_their_options(path: Path) -> None:
    for line, text in messages(path):
        for found in COMMAND.finditer(text):
            words = tuple(found[1].replace("|", " ").split())
            named = next((words[:count] for count in (2, 1) if words[:count] in EVERY), None)
            assert named is not None, f"{path}:{line}: `trtforge {found[1]}` is not a command"
            wrong = set(OPTION.findall(found[1])) - EVERY[named]
            assert not wrong, f"{path}:{line}: `trtforge {found[1]}` has no {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(path.parents[2])))
def test_named_options_exist(path: Path) -> None:
    known = {"--help"}.union(FOREIGN, *EVERY.values())
    for line, text in messages(path):
        named = set(OPTION.findall(text)) if not text.startswith("--") or ". " in text or ": " in text else set()
        assert named <= known, f"{path}:{line}: no command has {named - known}: {text}"


def test_a_hint_in_a_build_names_the_recipes_keys() -> None:
    options = frozenset({"--set", "--out", "--quant"})
    for given, wanted in (
        ("use the embedded engine with --backend torch.", "use the embedded engine with --set engine.backend=torch."),
        ("Choose a --tp that divides 8: 1, 2.", "Choose a parallel.tp that divides 8: 1, 2."),
        ("Use --ep 1.", "Use --set parallel.ep=1."),
        ("Choose another --out, or --quant fp8.", "Choose another --out, or --quant fp8."),
        ("convert it with --allow-nonfinite (verify", "convert it with --set model.allow_nonfinite=true (verify"),
        ("Use `--compute-dtype float32`.", "Use `--set engine.compute_dtype=float32`."),
        ("Run `trtforge compile A B --backend torch`.", "Run `trtforge compile A B --backend torch`."),
        ("Give --seq-len 128 or less.", "Give --set quantization.calibration.sequence_length=128 or less."),
        ("another --gpu, or --gpu h100-80gb.", "another engine.target.gpu, or --set engine.target.gpu=h100-80gb."),
    ):
        assert for_command(given, options) == wanted
        assert for_command(given, frozenset()) == given


def test_a_hint_in_a_command_that_chooses_the_rest_itself_names_its_own_options() -> None:
    options = frozenset({"--quant", "--tp", "--gpu"})
    for given, wanted in (
        ("Use --quant int4_awq --dtype float16.", "Use --quant int4_awq."),
        ("Use --dtype float16 --tp 2.", "Use --tp 2."),
        ("Use --dtype float16.", "Use --dtype float16."),
        ("Use --tp 2, or see --target-version.", "Use --tp 2, or see --target-version."),
        ("Use --dtype float16 and compare, or another --gpu.", "Use --dtype float16 and compare, or another --gpu."),
        ("Give --kv-cache fp8 --dtype float16 --tp 2 --quant fp8 then.", "Give --tp 2 --quant fp8 then."),
    ):
        assert for_command(given, options) == wanted


@pytest.mark.parametrize(
    ("line", "repair", "expected"),
    [
        ("biuld x", Repair("biuld", "build"), "trtforge build x"),
        ("build x --set a.b=1", Repair("a.b", "a.c"), "trtforge build x --set a.c=1"),
        ("build x --set a.b=fp7", Repair("fp7", "fp8"), "trtforge build x --set a.b=fp8"),
        ("plan x --gpu=h10", Repair("h10", "h100"), "trtforge plan x --gpu=h100"),
        ("build 'a b'", Repair("a b", "a c"), "trtforge build 'a c'"),
        ("build x", Repair("y", "z"), None),  # the mistake is in a file
        ("plan x --tp 3", Repair(options=(("--tp", "4"),)), "trtforge plan x --tp 4"),
        ("plan x --tp=3", Repair(options=(("--tp", "4"), ("--pp", "2"))), "trtforge plan x --tp=4 --pp 2"),
        ("build x", Repair(options=(("--set", "a.b=4"),)), "trtforge build x --set a.b=4"),
        (
            "build x --set a.c=1 --set a.b=3",
            Repair(options=(("--set", "a.b=4"),)),
            "trtforge build x --set a.c=1 --set a.b=4",
        ),
        ("doctor x", Repair(options=(("--tp", "4"),)), "trtforge doctor x --set parallel.tp=4"),
        ("serve x", Repair(options=(("--tp", "4"),)), None),
    ],
)
def test_a_command_line_is_repaired(line: str, repair: Repair, expected: str | None) -> None:
    words = shlex.split(line)
    assert repaired(words, repair, options_of(words)) == expected


def test_every_key_of_a_hint_is_a_recipes() -> None:
    for key in _KEYS.values():
        model: Any = Recipe
        for part in key.split("."):
            assert part in model.model_fields, key
            model = model.model_fields[part].annotation


def test_the_options_of_a_command_line() -> None:
    assert "--against" in options_of(["verify", "a", "--against", "b"])
    assert "--max-size" in options_of(["cache", "prune"])
    assert options_of(["--verbose"]) == options_of([])
