"""The threads that compute for a thread end when it leaves the computing to another one."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.patience import PATIENCE
from trtforge.runtime.native.bindings import Int8Layer, Native, PagedHeads, PagedRows, native, pack_int8
from trtforge.runtime.native.delta_rule import delta_tokens
from trtforge.runtime.native.experts import Experts, Routes, mix, route
from trtforge.runtime.native.float32 import linear
from trtforge.runtime.native.recorder import Arena
from trtforge.runtime.native.threads import release_threads
from trtforge.runtime.native.tiles import pack_float32


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_released_threads_end_and_come_again() -> None:
    kernels = native()
    assert kernels is not None, "these machines have a C++ compiler"
    x, weight, before = torch.randn(64, 1024), torch.ones(1024), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = kernels.rms_norm(x, weight, 1e-5)
        computing = tasks()
        release_threads(kernels)
        deadline = time.monotonic() + 10
        while tasks() > computing - 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tasks() <= computing - 2
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5), expected)
        assert tasks() >= computing
    finally:
        torch.set_num_threads(before)
        release_threads(kernels)


@pytest.mark.parametrize("computes", [True, False])
def test_a_forked_child_ends(computes: bool) -> None:
    """Its parent has threads that it has not. The child uses no operation of torch that has threads."""
    code = f"""
import os, sys
import trtforge.runtime, torch
from trtforge.runtime.native.bindings import native
torch.set_num_threads(2)
kernels, x, weight = native(), torch.randn(64, 1024), torch.ones(1024)
expected = kernels.rms_norm(x, weight, 1e-5).numpy().tobytes()
child = os.fork()
if child == 0:
    same = not {computes} or kernels.rms_norm(x, weight, 1e-5).numpy().tobytes() == expected
    sys.exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 24])
def test_attention_does_not_depend_on_which_thread_computes_a_row(dtype: torch.dtype, rows: int) -> None:
    """A thread that is done takes rows of others, or ranges of tokens: another time other ones."""
    kernels = native()
    assert kernels is not None, "these machines have a C++ compiler"
    before = torch.get_num_threads()
    torch.manual_seed(0)
    lengths = torch.arange(rows) * 7 + 90
    tables = torch.arange(rows * 20).view(rows, 20)
    storage = torch.randn(rows * 20, 16, 4, 64).to(dtype)
    queries, how = torch.randn(rows, 12, 64).to(dtype), PagedHeads(8, 2, 64, 4, 0.125)
    torch.set_num_threads(3)
    try:
        made = []
        for _ in range(200):
            out = torch.empty(rows, 8 * 64, dtype=dtype)
            kernels.attend(queries, PagedRows(tables, lengths, 16), storage, 1.0, how, out)
            made.append(out)
        assert all(torch.equal(each, made[0]) for each in made)
    finally:
        torch.set_num_threads(before)
        release_threads(kernels)


def products(kernels: Native, rows: int) -> torch.Tensor:
    """Of a layer of 8 tiles; all activations are rounded before any is multiplied."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-127, 128, (256, 64), dtype=torch.int8, generator=generator)
    layer = Int8Layer(*pack_int8(weight), torch.ones(64), torch.ones(256), None, 1.0)
    return kernels.linear_int8(torch.randint(-127, 128, (rows, 64), generator=generator).float(), layer)


def by_experts(kernels: Native, rows: int) -> list[Tensor]:
    """Routes, a mixture, and the delta rule, of so much that threads share it."""
    generator = torch.Generator().manual_seed(rows)
    x, out = torch.randn(rows, 1024, generator=generator), torch.empty(rows, 1024)
    weights = [pack_float32(torch.randn(1024, 1024, generator=generator)) for _ in range(3)]
    layers = [partial(linear, kernels, weight=weight, bias=None, outputs=1024) for weight in weights]
    experts = Experts.recorded(layers, 1024, torch.float32, Arena())
    assert experts is not None
    routes = Routes(512, 2, 1, 1, "softmax", renormalize=True, scaling=1.0)
    logits = torch.randn(rows, 512, generator=generator)
    shares, chosen = route(kernels, logits, None, routes)
    both = torch.stack((chosen[:, 0] % 3, (chosen[:, 0] + 1) % 3), dim=1)
    mix(kernels, x, (shares, both), experts, out, first=0, accumulate=False, on_inputs=False)
    heads = torch.randn(3, rows, 4, 64, generator=generator).unbind()
    rates = torch.rand(2, rows, 4, generator=generator).unbind()
    states = [torch.randn(4, 64, 64, generator=generator) for _ in range(rows)]
    learned = delta_tokens(kernels, (*heads, rates[0], -rates[1]), states, states)
    return [shares, chosen, out, learned, *states]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_computes_everything_once(own: bool, threads: int) -> None:
    """With more threads than processors as well, where each has to wait for one that is not running."""
    kernels = native()
    assert kernels is not None, "these machines have a C++ compiler"
    before = torch.get_num_threads()
    kernels.functions.use_own_threads(own)
    torch.set_num_threads(threads)
    try:
        for rows in (1, 5, 40):
            x, change, weight = torch.randn(3, rows, 1024).unbind()
            total, normed = kernels.add_rms_norm(x, change, weight[0], 0.5, 1e-5)
            assert torch.equal(total, x + 0.5 * change)
            expected = torch.nn.functional.rms_norm(total, (1024,), weight[0], 1e-5)
            torch.testing.assert_close(normed, expected)
            assert torch.equal(kernels.add(x, change, 1.0), x + change)
            computed = [by_experts(kernels, rows) for _ in range(5)]
            if kernels.multiplies_integers:
                found = [products(kernels, rows) for _ in range(20)]
                torch.set_num_threads(1)
                assert all(torch.equal(each, products(kernels, rows)) for each in found)
                torch.set_num_threads(threads)
            torch.set_num_threads(1)
            alone = by_experts(kernels, rows)
            assert all(torch.equal(*pair) for each in computed for pair in zip(each, alone, strict=True))
            torch.set_num_threads(threads)
    finally:
        torch.set_num_threads(before)
        kernels.functions.use_own_threads(True)
        release_threads(kernels)


@pytest.mark.parametrize(("first", "brief"), [("trtforge.runtime", True), ("torch", False)])
def test_kernels_have_threads_of_their_own_unless_those_of_openmp_spin_for_long(first: str, brief: bool) -> None:
    """OpenMP reads its settings when torch is loaded; afterwards they cannot be changed."""
    code = f"import {first}, trtforge.runtime; from trtforge.core.threads import wait_briefly; print(wait_briefly())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": "/bin"}
    )
    assert done.stdout.split() == [str(brief)]
