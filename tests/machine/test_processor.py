"""What a CPU says of itself, and the type that engines compute in on it."""

from pathlib import Path

import pytest

from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.core.recipe import DtypeChoice
from trtforge.machine.host import Host
from trtforge.machine.processor import Processor, compute_dtype


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2", Processor(bfloat16=False, vnni=False)),
        ("fpu avx512f avx512_vnni", Processor(bfloat16=False, vnni=True)),
        ("fpu avx512_bf16 avx512_vnni", Processor(bfloat16=True, vnni=True)),
        ("fpu amx_bf16 amx_tile avx_vnni", Processor(bfloat16=True, vnni=False)),
    ],
)
def test_flags_are_read(flags: str, expected: Processor, tmp_path: Path) -> None:
    path = tmp_path / "proc" / "cpuinfo"
    path.parent.mkdir()
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx512_bf16_is_not_read_here\n")
    assert Processor.of(Host(root=tmp_path, environment={"CXX": "none"})) == expected


def test_kernels_want_a_compiler() -> None:
    assert Processor.of(Host()).kernels
    assert not Processor.of(Host(environment={"CXX": "none"})).kernels


def test_a_cpu_that_cannot_be_read_has_nothing(tmp_path: Path) -> None:
    assert Processor.of(Host(root=tmp_path, environment={"CXX": "none"})) == Processor(bfloat16=False, vnni=False)


@pytest.mark.parametrize(
    ("requested", "model", "device", "bfloat16", "expected"),
    [
        ("auto", "bfloat16", "cpu", True, "bfloat16"),
        ("auto", "bfloat16", "cpu", False, "float32"),
        ("auto", "float16", "cpu", True, "float32"),
        ("auto", "float16", "cuda", False, "float16"),
        ("float16", "bfloat16", "cpu", True, "float16"),
    ],
)
def test_the_compute_type(
    requested: DtypeChoice, model: ModelDtype, device: UsableDevice, bfloat16: bool, expected: ModelDtype
) -> None:
    assert compute_dtype(requested, model, device, Processor(bfloat16=bfloat16, vnni=False)) == expected
