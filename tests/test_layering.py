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
    "reference": 3,
    "runtime": 3,
    "calibrate": 4,
    "convert": 4,
    "migrate": 4,
    "doctor": 4,
    "compile": 4,
    "package": 4,
    "serve": 4,
    "verify": 4,
    "pipeline": 5,
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


def test_no_file_is_longer_than_400_lines() -> None:
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}


@pytest.mark.parametrize(
    "words",
    [
        [],
        *(
            [c]
            for c in (
                "build",
                "calibrate",
                "convert",
                "verify",
                "compile",
                "package",
                "migrate",
                "serve",
                "infer",
                "plan",
                "recipes",
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
        "heavy = {'torch', 'transformers', 'numpy', 'tritonclient'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: trtforge" in done.stdout
    assert not words or words == ["recipes"] or "Example: trtforge" in done.stdout
