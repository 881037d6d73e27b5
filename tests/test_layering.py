"""The house: imports point downward, stages do not know one another, and `--help` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "trtforge"
FLOORS = {
    "core": 0,
    "machine": 1,
    "formats": 1,
    "engine_process": 2,
    "models": 2,
    "plan": 3,
    "launch": 3,
    "reference": 3,
    "runtime": 3,
    "calibrate": 4,
    "convert": 4,
    "migrate": 4,
    "doctor": 4,
    "gateway": 4,
    "api": 4,
    "compile": 4,
    "deploy": 4,
    "package": 4,
    "serve": 4,
    "verify": 4,
    "advise": 5,
    "pipeline": 5,
    "tune": 5,
    "cli": 6,
}
MODULES = sorted(ROOT.rglob("*.py"))


def part_of(module: str) -> str | None:
    """The floor's part that `trtforge.x.y` belongs to; None for the package itself and foreign modules."""
    words = module.split(".")
    return words[1] if words[0] == "trtforge" and len(words) > 1 else None


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    part = own_part(path)
    if part in ("__init__", "__main__"):
        return
    assert part in FLOORS, f"{part} has no floor"
    for module in imports_of(path):
        other = part_of(module)
        if other is None or other == part or other not in FLOORS:
            continue
        assert FLOORS[other] < FLOORS[part], f"{path} imports {module}"


def test_only_one_module_imports_tensorrt_llm() -> None:
    guilty = [p for p in MODULES if any(m.split(".")[0] == "tensorrt_llm" for m in imports_of(p))]
    assert guilty == [ROOT / "compile" / "inside" / "rank.py"]


def test_what_runs_beside_tensorrt_llm_stands_alone() -> None:
    for path in (ROOT / "compile" / "inside").glob("*.py"):
        assert [module for module in imports_of(path) if part_of(module) is not None] == []


def test_only_machine_reads_proc_control_groups_and_nvml() -> None:
    guilty = []
    for path in MODULES:
        if own_part(path) == "machine":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_path = node.value.lstrip("/").startswith(("proc/", "sys/fs/")) and " " not in node.value
                if is_path or node.value == "pynvml":
                    guilty.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert guilty == []


def test_imports_form_no_circle() -> None:
    """Between the packages of one floor too, and between the subpackages of the runtime."""
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        own = package_of(path.relative_to(ROOT.parent).with_suffix("").parts)
        for module in imports_of(path):
            other = package_of(tuple(module.split("."))) if part_of(module) is not None else own
            if other != own:
                edges.setdefault(own, set()).add(other)
    assert circle_in(edges) == []


def package_of(words: tuple[str, ...]) -> str:
    """The package of a module; of the runtime, the subpackage."""
    inner = words[1] == "runtime" and len(words) > 2 and (ROOT / "runtime" / words[2]).is_dir()
    return "/".join(words[1:3]) if inner else words[1]


def circle_in(edges: dict[str, set[str]]) -> list[str]:
    """The packages of one import cycle; empty if there is none."""
    done: set[str] = set()

    def walk(package: str, path: tuple[str, ...]) -> list[str]:
        if package in path:
            return [*path[path.index(package) :], package]
        if package in done:
            return []
        for other in sorted(edges.get(package, ())):
            found = walk(other, (*path, package))
            if found:
                return found
        done.add(package)
        return []

    return next((found for package in sorted(edges) if (found := walk(package, ()))), [])


def test_no_function_is_longer_than_60_lines() -> None:
    """Of its body: the signature of a command is a table of its options."""
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": lines
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.body[0].lineno + 1) > 60
    }
    assert long == {}


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}


def run_python(code: str) -> str:
    """What a program prints, which must succeed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        *(
            [c]
            for c in (
                "build",
                "compare",
                "calibrate",
                "convert",
                "verify",
                "compile",
                "package",
                "migrate",
                "serve",
                "status",
                "stop",
                "infer",
                "gateway",
                "generate",
                "bench",
                "tune",
                "advise",
                "probe",
                "plan",
                "recipes",
                "inspect",
                "version",
                "doctor",
                "cache",
            )
        ),
    ],
    ids=lambda words: " ".join(words) or "trtforge",
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['trtforge', *{words!r}, '--help']\n"
        "from trtforge.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "names = {'torch', 'transformers', 'numpy', 'tritonclient', 'rich', 'yaml', 'trtforge.engine_process'}\n"
        "heavy = names & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    printed = run_python(code)
    assert "Usage: trtforge" in printed
    assert not words or "Example: trtforge" in printed


def test_a_client_of_one_protocol_does_not_load_the_other() -> None:
    """`infer` and `chat` start on what gRPC needs; httpx also imports rich and pygments."""
    code = (
        "import sys\n"
        "import trtforge.serve.client, trtforge.serve.conversation\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tritonclient', 'httpx', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run_python(code)
