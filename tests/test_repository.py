"""What belongs to the repository, and what never does."""

import re
import subprocess
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
