"""A short form of the assault with damaged files: `python -m tests.assault fuzz` is the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.assault.fuzz_build import faults_of, main
from tests.assault.fuzz_mutations import damage
from tests.assault.fuzz_scenarios import SCENARIOS
from tests.assault.fuzz_worker import Outcome

ROOT = Path(__file__).parents[2]
SEED, CASES = 13, 60


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the runner forks, and must not have computed."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.assault.fuzz_build", *words],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "TRTFORGE_CACHE": "off"},
    )  # fmt: skip


def test_damaged_files_are_refused_in_words() -> None:
    done = fuzz("--cases", str(CASES), "--seed", str(SEED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES} cases in" in done.stdout
    assert "; 0 with faults" in done.stdout


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"status": 1, "stderr": "error: a\nhint: b\n"}, []),
        ({"status": 1, "stderr": "error: a\n"}, ["no hint:"]),
        ({"status": 2, "stderr": "hint: a\n"}, ["no error:"]),
        ({"status": 1, "stderr": "error: a\nhint: \n"}, ["no hint:"]),
        ({"status": 70, "stderr": "Traceback (most recent call last):\n"}, ["traceback"]),
        ({"status": 3}, ["status 3"]),
        ({"status": -11}, ["status -11"]),
        ({"timed_out": True}, ["hang"]),
        ({"memory": 2 << 30}, ["memory 2048 MB"]),
    ],
)
def test_faults_are_seen(changes: dict[str, object], faults: list[str]) -> None:
    values = {"status": 0, "seconds": 0.1, "memory": 0, "stdout": "", "stderr": "", "timed_out": False} | changes
    assert list(faults_of(Outcome(**values))) == faults  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.yaml", "a.safetensors", "a.log", "a.pbtxt"])
def test_damage_is_decided_by_the_seed(name: str) -> None:
    import random

    header = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    data = len(header).to_bytes(8, "little") + header + b"x" if name.endswith("safetensors") else b'{"a": [1, "b"]}\n'
    found = [damage(Path(name), data, random.Random(f"{seed}:1")) for seed in (*range(20), *range(20))]
    assert found[:20] == found[20:]
    assert len({content for content, _ in found}) > 5


def test_every_command_that_reads_files_is_run() -> None:
    commands = {scenario.words[0] for scenario in SCENARIOS}
    assert commands >= {"convert", "calibrate", "verify", "compile", "package", "inspect", "plan", "recipes", "doctor"}
    assert commands >= {"generate", "build", "migrate", "serve", "adopt"}


def test_a_bad_option_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "x"])
