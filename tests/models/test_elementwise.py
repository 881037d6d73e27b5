"""torch's elementwise functions are accurate from their first call in several threads on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trtforge.models import elementwise

SCRIPT = """
import importlib, json, sys

importlib.import_module(sys.argv[1])
import torch

torch.set_num_threads(2)
numbers = torch.linspace(0.01, 0.99, 1 << 15)
found = {}
for name in "acos asin atan cos erf erfc exp expm1 log log10 log1p log2 sin sqrt tan tanh".split():
    function = getattr(torch, name)
    got, expected = function(numbers).double(), function(numbers.double())
    found[name] = float(((got - expected) / expected).abs().max())
print(json.dumps({"chosen": "trtforge.models.elementwise" in sys.modules, "errors": found}))
"""


@pytest.mark.parametrize(
    "module", ["trtforge.runtime.engine", "trtforge.runtime.ranks.worker_main", "trtforge.reference.streaming"]
)
def test_whatever_computes_chooses_the_kernels_first(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, module], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["chosen"]
    assert {name: error for name, error in found["errors"].items() if error > 1e-5} == {}


def test_the_functions_are_those_that_torch_gives_to_onemkl() -> None:
    header = (Path(torch.__path__[0]) / "include/ATen/cpu/vml.h").read_text()
    named = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header, re.MULTILINE))
    assert "cos" in named
    assert named - {function.__name__ for function in elementwise._FUNCTIONS} == set()


def test_all_functions_are_called_with_both_types(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[torch.dtype, int]] = []
    monkeypatch.setattr(elementwise, "_FUNCTIONS", [lambda number: called.append((number.dtype, number.numel()))])
    elementwise.choose_kernels()
    assert called == [(torch.float32, 1), (torch.float64, 1)]
