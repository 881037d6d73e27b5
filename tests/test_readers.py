"""Files of others are read by guarded readers only, in one place for each format."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "trtforge"
READERS = {
    "core/json_text.py": {"json.loads"},
    "core/yaml_text.py": set(),
    "formats/tensor_files.py": {"load_file", "safe_open"},
    # What runs beside TensorRT-LLM stands alone; the checkpoint was read and checked before it is started.
    "compile/inside/rank.py": {"json.loads"},
    # A template that was read and checked, in a process with limits.
    "package/template_main.py": {"json.load"},
    "core/call_json.py": {"json.JSONDecoder"},  # what it renders, there; and answers, which the gateway limits
    # The job that our own process hands over in the arguments.
    "runtime/ranks/worker_main.py": {"model_validate_json"},
    "runtime/hosted.py": {"model_validate_json"},
    # What our own processes say to one another; the engine process needs the standard library only.
    "engine_process/frames.py": {"json.loads"},
    "engine_process/start.py": {"json.loads"},
    "serve/reap.py": {"json.loads"},
    # Bodies of HTTP requests and Triton's answers, with limits of their own.
    "serve/front/json_body.py": {"json.loads"},
    "serve/front/answers.py": {"json.loads"},
    "gateway/kserve_tensors.py": {"json.loads"},
}
_MODULES = {"json": {"load", "loads", "JSONDecoder"}, "pickle": {"load", "loads", "Unpickler"}, "torch": {"load"}}
_MODULES |= {"yaml": {"load", "load_all", "safe_load", "safe_load_all", "full_load", "unsafe_load", "compose", "parse"}}
_ANYWHERE = {"load_file", "safe_open", "model_validate_json"}
_FROM = {name for names in _MODULES.values() for name in names} - {"load", "parse", "compose"}


def raw_readers(path: Path) -> Iterator[str]:
    """The parsers of files that a module calls or imports by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in _MODULES.get(module, ()):
                yield f"{module}.{node.attr}"
            elif node.attr in _ANYWHERE:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in (*_MODULES, "safetensors", "safetensors.torch"):
            yield from (alias.name for alias in node.names if alias.name in _ANYWHERE | _FROM)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_other_module_parses_files(path: Path) -> None:
    assert set(raw_readers(path)) <= READERS.get(path.relative_to(ROOT).as_posix(), set())


def test_the_readers_are_where_they_are_said_to_be() -> None:
    assert {name: set(raw_readers(ROOT / name)) for name in READERS} == READERS


@pytest.mark.parametrize(
    "code", ["import json\njson.load(f)", "import yaml\nx = yaml.safe_load", "from safetensors import safe_open"]
)
def test_a_raw_reader_is_found(tmp_path: Path, code: str) -> None:
    (tmp_path / "a.py").write_text(code)
    assert list(raw_readers(tmp_path / "a.py"))
