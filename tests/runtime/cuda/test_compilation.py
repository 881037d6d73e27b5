"""The Triton kernels compile for GPUs that this machine need not have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.kernel_levels import EVERY

_VARIANTS = {80: 63, 90: 69} if EVERY else {90: 20}
SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may have; of GPUs of SM 8, where there are least (8.6 and 8.9; CUDA C++ programming guide)."""


@pytest.mark.parametrize("sm", _VARIANTS)
def test_kernels_compile_to_machine_code(sm: int, tmp_path: Path) -> None:
    """Each hardly spills a register; of all levels, also for caches of every type and with all changes of scores."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.cuda.compilation", str(sm), "every" if EVERY else "first"],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    variants = [line.split() for line in done.stdout.splitlines()]
    assert len(variants) == _VARIANTS[sm]
    for _, shared, registers, spilled in variants:
        assert int(shared) <= SHARED[sm]
        assert int(registers) <= 255
        assert int(spilled) <= 128
