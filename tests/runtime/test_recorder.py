"""Recorded kernel calls compute what they computed, from the same memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.adapters import Matrices, add_adapters
from trtforge.runtime.native.bindings import (
    Native,
    PagedHeads,
    PagedRows,
    native,
)
from trtforge.runtime.native.call_capture import CallCapture
from trtforge.runtime.native.expanded import ExpandedLayer, linear_expanded
from trtforge.runtime.native.experts import Experts, Routes, gate_pairs, mix, route, scale_rows_by_gate, widened
from trtforge.runtime.native.float32 import linear as linear_float32
from trtforge.runtime.native.heads import copy_heads, project_heads
from trtforge.runtime.native.norms import norm
from trtforge.runtime.native.recorder import (
    Arena,
    NotRecordedError,
    current_recorder,
    interrupt_recording,
    narrow_recording,
    recording,
)
from trtforge.runtime.native.screened import Screened
from trtforge.runtime.native.structures import INTEGERS, PRODUCTS, RECORDED
from trtforge.runtime.native.tiles import Int8Layer, pack_bfloat16, pack_float32, pack_int8
from trtforge.runtime.ranks.shared_sums import SharedSums

BLOCK = 8


@pytest.fixture(scope="module")
def kernels() -> Native:
    found = native()
    assert found is not None, "these machines have a C++ compiler"
    return found


def test_every_kernel_is_called_again(level: Native) -> None:
    """With the arguments that it had, and in the order of the calls."""
    kernels = level
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), torch.randn(64)
    half, matrix = torch.randn(3, 64).bfloat16(), pack_bfloat16(torch.randn(32, 64).bfloat16())
    heads, codes = torch.randn(3, 4, 16), torch.randint(-8, 8, (32, 64), dtype=torch.int8)
    cos, sin = torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    storage, slots = torch.zeros(4, BLOCK, 2, 16), torch.tensor([0, 9, 17])
    rows = PagedRows(torch.tensor([[0, 0], [1, 0], [2, 3]]), torch.tensor([1, 2, 9]), BLOCK)
    how = PagedHeads(heads=2, kv_heads=1, size=16, vectors=2, scale=0.25)
    words = torch.randint(-(2**15), 2**15, (1, 16, 32), dtype=torch.int16)
    scales = torch.rand(1, 1, 32)
    floats, pairs = pack_float32(torch.randn(40, 64)), pack_float32(torch.randn(128, 64))
    layer, sums = Int8Layer(*pack_int8(codes), torch.ones(64), torch.rand(32), None, 0.1), SharedSums(kernels, 1, 1)

    logits = torch.randn(3, 2)
    routes = Routes(num_experts=2, top_k=1, groups=1, top_groups=1, scoring="softmax", renormalize=False, scaling=1.0)
    experts = Experts.recorded(
        [lambda x: gate_pairs(kernels, linear_float32(kernels, x, pairs, None, 128), 7.0, 1.7)] * 2,
        64,
        torch.float32,
        Arena(),
    )
    assert experts is not None

    def compute() -> list[Tensor]:
        total, normed = kernels.add_rms_norm(x, x, weight, 0.5, 1e-5)
        kernels.rotate(heads, cos, sin, interleaved=False)
        kernels.write_slots(storage.view(-1, 2, 16), slots, heads[:, 2:])
        kernels.quantize_slots(integers, slots, heads[:, 2:], 0.02)
        attended, changed = torch.empty(3, 32), kernels.add(x, x, 1.0)
        kernels.attend(heads, rows, storage, 1.0, how, attended)
        add_adapters(kernels, x, adapters, columns, owners, changed)
        sums.add_up(attended, 0, 0)
        projected, copied = torch.empty(3, 4, 16), torch.empty(3, 2, 16)
        project_heads(kernels, heads, by_head, projected)
        copy_heads(kernels, heads[:, :2], copied)
        mixed, routed = torch.empty_like(x), route(kernels, logits, None, routes)
        mix(kernels, x, routed, experts, mixed, first=0, accumulate=False, on_inputs=False)
        return [
            kernels.rms_norm(x, weight, 1e-5),
            kernels.add(x, x, 3.0),
            total,
            normed,
            attended,
            kernels.gate(x, "silu", 0),
            *((kernels.linear(half, matrix, None, 32),) if kernels.multiplies else ()),
            *((kernels.linear_int4(half, words, scales, None),) if kernels.multiplies else ()),
            *((kernels.linear_int8(x, layer),) if kernels.multiplies_integers else ()),
            linear_float32(kernels, x, floats, None, 40),
            linear_expanded(kernels, x, ExpandedLayer("bfloat16", matrix, 32)),
            head(x),
            norm(kernels, x, weight, weight, 1e-5, centred=True),
            activate(kernels, x, "gelu"),
            widened(kernels, half),
            gate_pairs(kernels, x, 7.0, 1.7),
            scale_rows_by_gate(kernels, kernels.add(x, x, 1.0), x, weight.view(1, -1)),
            mixed,
            *routed,
            kernels.lookup(table, slots, 0.5, 1),
            *kernels.rotation(slots, frequencies, 1.0, torch.float32, interleaved=False),
            changed,
            projected,
            copied,
        ]

    head = Screened(kernels, ExpandedLayer("bfloat16", matrix, 32), 64, by_products=False, valid=32)
    head.need(1)
    table, frequencies = torch.randn(20, 64), torch.rand(8)
    adapters = Matrices(torch.randn(2, 1, 4, 64), torch.randn(2, 4, 64), torch.tensor([[4], [3]]))
    owners, columns = torch.tensor([1, -1, 0]), torch.tensor([[0, 64]])
    integers, by_head = torch.zeros(18, 2, 16, dtype=torch.int8), torch.randn(4, 16, 16)
    heads_before = heads.clone()
    expected = [tensor.clone() for tensor in (*compute(), heads, storage, integers)]
    with recording(Arena()) as recorder:
        made = compute()
    calls, kept = recorder.calls()
    lacking = {*(() if kernels.multiplies else PRODUCTS), *(() if kernels.multiplies_integers else INTEGERS)}
    assert {RECORDED[call.kernel] for call in calls} == set(RECORDED) - lacking
    assert current_recorder() is None
    heads.copy_(heads_before)
    for tensor in (*made, storage, integers):
        tensor.zero_()
    kernels.replay(calls)
    assert kept
    for again, once in zip((*made, heads, storage, integers), expected, strict=True):
        assert torch.equal(again, once)
    counts = recorder.row_counts(calls, 3, 3)
    for size in (1, 2, 3):
        heads.copy_(heads_before)
        for tensor in (*made, storage, integers):
            tensor.zero_()
        kernels.set_rows(counts, size, size)
        kernels.replay(calls)
        for again, once in zip(made, expected, strict=False):
            assert torch.allclose(again[:size], once[:size], rtol=1e-5, atol=1e-5)  # one row is summed in another order
            assert not again[size:].any()
        assert torch.equal(heads[size:], heads_before[size:])
        assert storage.view(-1, 2, 16)[slots[:size]].flatten(1).any(1).all()
        for written in (storage.view(-1, 2, 16), integers):
            assert not written[slots[size:]].any()


def test_what_torch_computes_is_not_recorded(kernels: Native) -> None:
    x, weight = torch.randn(2, 32), torch.randn(32)
    with recording(Arena()) as looked:
        kernels.rms_norm(x.view(4, 16)[:2].flatten(), weight, 1e-5)
    assert len(looked.calls()[0]) == 1
    for compute in (lambda y: y + 1, lambda y: y.add_(1), lambda y: y.t().flatten(), lambda y: float(y[0, 0])):
        with recording(Arena()):
            normed = kernels.rms_norm(x, weight, 1e-5)
            with pytest.raises(NotRecordedError):
                compute(normed)


def test_recordings_that_compute_nothing_end_where_torch_would_compute(kernels: Native) -> None:
    x, weight = torch.randn(2, 32), torch.randn(32)
    after: list[Tensor] = []

    def compute() -> Tensor:
        normed = kernels.rms_norm(x, weight, 1e-5)
        after.append(normed + 1)
        return normed

    assert CallCapture(kernels)(compute, 2, 2) is None
    assert not after
    assert current_recorder() is None
    for refuse in (interrupt_recording, lambda: kernels.run("has_matmul")):
        with pytest.raises(NotRecordedError), recording(Arena()):
            refuse()


def test_a_capture_computes_as_many_rows_as_it_is_told(kernels: Native) -> None:
    """The second kernel only those that give logits."""
    x, weight = torch.randn(4, 32), torch.randn(32)

    def compute() -> tuple[Tensor, Tensor]:
        normed = kernels.rms_norm(x, weight, 1e-5)
        narrow_recording()
        return normed, kernels.add(normed[:3], normed[:3], 1.0)

    captured = CallCapture(kernels)(compute, 4, 3)
    assert captured is not None
    (normed, doubled), replay = captured
    for rows, wanted in ((4, 3), (2, 1), (3, 3)):
        x.mul_(3).add_(1)
        normed.zero_()
        doubled.zero_()
        replay(rows, wanted)
        expected = kernels.rms_norm(x, weight, 1e-5)
        assert torch.equal(normed[:rows], expected[:rows])
        assert torch.equal(doubled[:wanted], 2 * expected[:wanted])
        assert not normed[rows:].any()
        assert not doubled[wanted:].any()


@given(layers=st.lists(st.lists(st.integers(0, 300), max_size=6), min_size=2, max_size=5), data=st.data())
def test_results_outlive_the_next_layer(layers: list[list[int]], data: st.DataObject) -> None:
    """No tensor of an arena changes before the layer after next; tensors of one layer do not overlap."""
    arena = Arena()
    before: list[Tensor] = []
    for number, sizes in enumerate(layers):
        arena.turn()
        made = [arena.like(torch.empty(size, dtype=torch.int16)) for size in sizes]
        for index, tensor in enumerate(made):
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(100 * number + index)
        for index, tensor in enumerate(made):
            assert (tensor == 100 * number + index).all()
        for index, tensor in enumerate(before):
            assert (tensor == 100 * (number - 1) + index).all()
        before = made
