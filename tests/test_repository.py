"""What belongs to the repository, and what never does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says what is ignored")
def test_environments_are_ignored_also_as_links(tmp_path: Path) -> None:
    """Where a link .venv is tracked, git replaces an environment of this name, which it ignores, without a word."""
    made = set(re.findall(r"(?:-m venv |VENV := )(\.\S+)", (ROOT / "Makefile").read_text()))
    assert {".venv", ".venv-openvino"} <= made
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    for name in made:
        (tmp_path / name).symlink_to(tmp_path)
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert found.split() == ["??", ".gitignore"]


@pytest.mark.parametrize(("minor", "supported"), [(9, False), (10, True), (12, True), (13, False)])
def test_make_install_names_an_unsupported_python_before_it_installs(
    minor: int, supported: bool, tmp_path: Path
) -> None:
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(
        f"#!{sys.executable}\nimport sys\nif sys.argv[1] == '-m':\n    sys.exit('no venv')\n"
        f"sys.version_info = (3, {minor}, 1, 'final', 0)\nexec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "install", f"PYTHON={python}", f"VENV={venv}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert not venv.exists()
    said = done.stderr.splitlines()[:2]
    if supported:  # the next step
        assert said[0] == "no venv"
    else:
        assert said == [
            f"error: {python} is Python 3.{minor}; trtforge needs 3.10 to 3.12",
            "hint: Name one that is installed: make install PYTHON=python3.12",
        ]
