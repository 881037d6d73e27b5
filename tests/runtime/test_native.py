"""The CPU kernels against torch's operations in float32: every storage type, odd shapes, slices, instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.runtime.kernel_levels import LEVELS, kernels_at
from trtforge.models.transforms import pack_int4, quantize_fp8
from trtforge.runtime.architecture.activations import NATIVE_ACTIVATIONS
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.decoder.alibi import Alibi
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype
from trtforge.runtime.decoder.scores import SoftmaxScores
from trtforge.runtime.linears.int4_native import Int4Native, _warn_of_dequantising, pack_words, unpack_words
from trtforge.runtime.linears.int8 import round_to_int8
from trtforge.runtime.linears.linear import Placement, Stored
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native import bindings, compiler
from trtforge.runtime.native.adapters import Matrices, add_adapters
from trtforge.runtime.native.bindings import (
    Native,
    PagedHeads,
    PagedRows,
)
from trtforge.runtime.native.tiles import Int8Layer, pack_bfloat16, pack_int8
from trtforge.runtime.scheduling.draft_trees import seen_slots

TYPES = (torch.float32, torch.bfloat16)
EXACT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
ROWS = st.integers(1, 150) | st.sampled_from([512, 513, 600])
"""Less than a register of rows, parts of two registers, and more than a block of them."""


@pytest.fixture(scope="module")
def kernels(level: Native) -> Native:
    return level


def near(made: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert made.dtype is dtype
    assert made.shape == expected.shape
    error = float((made.float() - expected).abs().max() / expected.abs().max())
    assert error <= EXACT[dtype], f"relative error {error}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (40, 1024)])
def test_rms_norm(kernels: Native, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    expected = functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-5)
    near(kernels.rms_norm(x, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_rms_norm_of_some_heads(kernels: Native, dtype: torch.dtype) -> None:
    heads, weight = torch.randn(5, 9, 16).to(dtype), torch.randn(16).to(dtype)
    expected = functional.rms_norm(heads[:, 2:6].float(), weight.shape, weight.float(), 1e-6)
    others = heads[:, [0, 1, 6, 7, 8]]
    kernels.rms_norm_heads(heads[:, 2:6], weight, 1e-6)
    near(heads[:, 2:6], expected, dtype)
    assert torch.equal(heads[:, [0, 1, 6, 7, 8]], others)


@pytest.mark.parametrize("dtype", TYPES)
def test_add(kernels: Native, dtype: torch.dtype) -> None:
    x, change = torch.randn(6, 51).to(dtype), torch.randn(6, 51).to(dtype)
    near(kernels.add(x, change, 0.25), x.float() + 0.25 * change.float(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_add_rms_norm(kernels: Native, dtype: torch.dtype) -> None:
    x, change, weight = (torch.randn(6, 48).to(dtype) for _ in range(3))
    total, normed = kernels.add_rms_norm(x, change, weight[0].contiguous(), 0.5, 1e-5)
    near(total, x.float() + 0.5 * change.float(), dtype)
    near(normed, functional.rms_norm(total.float(), (48,), weight[0].float(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"), [(64, (64,), 4), (40, (150, 7), 3), (1024, (96, 32, 32), 18), (64, (4100, 70), 5)]
)
def test_add_adapters(kernels: Native, dtype: torch.dtype, inputs: int, outputs: tuple[int, ...], rank: int) -> None:
    """Each row has the products of its own adapter's modules added, in their columns of `y` alone."""
    a = torch.randn(3, len(outputs), rank, inputs).to(dtype)
    b = (torch.randn(3, rank, sum(outputs)) / 8).to(dtype)
    ranks = torch.randint(0, rank + 1, (3, len(outputs)))
    x, whole = torch.randn(5, inputs).to(dtype), torch.randn(5, 3 * max(outputs)).to(dtype)
    columns = [(index * max(outputs), count) for index, count in enumerate(outputs)]
    slots, expected = torch.tensor([2, -1, 0, 2, 1]), whole.float()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for index, own in enumerate(b[slot].float().split(outputs, dim=-1)):
                (first, count), used = columns[index], ranks[slot, index]
                inner = x[row].float() @ a[slot, index, :used].float().t()
                expected[row, first : first + count] += inner @ own[:used]
    add_adapters(kernels, x, Matrices(a, b, ranks), torch.tensor(columns), slots, whole)
    near(whole, expected, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_rotate(kernels: Native, dtype: torch.dtype, interleaved: bool) -> None:
    """Part of the elements of some heads, against the same rotation by torch."""
    heads = torch.randn(4, 6, 20).to(dtype)
    cos, sin = torch.randn(4, 1, 12).to(dtype), torch.randn(4, 1, 12).to(dtype)
    expected = heads.float()
    Rotation(cos.float(), sin.float(), interleaved).turn(expected[:, 1:4])
    kernels.rotate(heads[:, 1:4], cos, sin, interleaved=interleaved)
    near(heads, expected, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=25)
@given(
    rows=st.lists(st.integers(-5, 60) | st.sampled_from([-(2**62), 2**62]), max_size=300),
    size=st.integers(1, 70),
    first=st.integers(0, 20),
    scale=st.sampled_from([1.0, 0.3, 22.625]),
)
def test_lookup(kernels: Native, dtype: torch.dtype, rows: list[int], size: int, first: int, scale: float) -> None:
    """Rows of a part of a table, rounded once; zeros for rows of other parts and for those that no part has."""
    table = torch.randn(25, size).to(dtype)
    expected = torch.zeros(len(rows), size, dtype=dtype)
    for index, row in enumerate(rows):
        if first <= row < first + len(table):
            expected[index] = table[row - first] * scale
    assert torch.equal(kernels.lookup(table, torch.tensor(rows, dtype=torch.int64), scale, first), expected)


@pytest.mark.parametrize("activated", [0, 1])
@pytest.mark.parametrize("name", bindings.ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES)
def test_gate(kernels: Native, dtype: torch.dtype, name: str, activated: int) -> None:
    halves = (torch.randn(9, 2 * 37) * 20).to(dtype)
    parts = halves.float().chunk(2, dim=1)
    active = parts[activated]
    act = next(function for function, known in NATIVE_ACTIVATIONS.items() if known == name)
    near(kernels.gate(halves, name, activated), act(active) * parts[1 - activated], dtype)


@settings(max_examples=25)
@given(
    rows=ROWS,
    tiles=st.integers(1, 4),
    inputs=st.integers(1, 40).map(lambda pairs: 2 * pairs) | st.sampled_from([64, 96, 256, 288, 544]),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_bfloat16_products(rows: int, tiles: int, inputs: int, biased: bool, seed: int) -> None:
    for found in every_way():
        torch.manual_seed(seed)
        outputs = tiles * bindings.TILE
        x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
        bias = torch.randn(outputs) if biased else None
        assert found.takes(weight)
        made = found.linear(x, pack_bfloat16(weight), bias, outputs)
        near(made, functional.linear(x.float(), weight.float(), bias), torch.bfloat16)


@settings(max_examples=25)
@given(
    rows=ROWS,
    tiles=st.integers(1, 3),
    group=st.sampled_from([32, 64, 96, 128, 256, 288]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_int4_products(rows: int, tiles: int, group: int, groups: int, seed: int) -> None:
    for found in every_way():
        torch.manual_seed(seed)
        outputs, inputs = tiles * bindings.TILE, group * groups
        codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
        scales, bias, x = torch.rand(outputs, groups), torch.randn(outputs), torch.randn(rows, inputs).bfloat16()
        by_tile = scales.view(tiles, bindings.TILE, groups).transpose(1, 2).contiguous()
        weight = (codes.view(outputs, groups, group) * scales.unsqueeze(2)).flatten(1)
        made = found.linear_int4(x, pack_words(codes), by_tile, bias)
        near(made, functional.linear(x.float(), weight, bias), torch.bfloat16)
        assert torch.equal(unpack_words(pack_words(codes)), codes)
        prequant = (torch.rand(inputs) + 0.5).bfloat16()
        made = found.linear_int4(x, pack_words(codes), by_tile, bias, prequant)
        near(made, functional.linear((x * prequant).float(), weight, bias), torch.bfloat16)


@settings(max_examples=25)
@given(
    rows=ROWS,
    tiles=st.integers(1, 3),
    inputs=st.integers(1, 36).map(lambda sixteens: 16 * sixteens),
    dtype=st.sampled_from(TYPES),
    biased=st.booleans(),
    seed=st.integers(0, 9),
)
def test_int8_products(rows: int, tiles: int, inputs: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    """Activations are rounded as by torch, some saturate, and the sums are those of the integers."""
    for found in every_way():
        if not found.multiplies_integers:
            continue
        torch.manual_seed(seed)
        outputs, scale = tiles * bindings.TILE, 0.017
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        prequant, scales = torch.rand(inputs) + 0.5, torch.rand(outputs)
        bias = torch.randn(outputs) if biased else None
        x = torch.randn(rows, inputs).to(dtype)
        assert found.takes_int8(weight)
        made = found.linear_int8(x, Int8Layer(*pack_int8(weight), prequant, scales, bias, scale))
        sums = round_to_int8(x * prequant, torch.tensor([scale])).double() @ weight.double().T
        near(made, (sums * scales + (0.0 if bias is None else bias)).float(), dtype)


def every_way() -> list[Native]:
    """The kernels with each way to multiply bfloat16: none on a processor without AVX-512."""
    return [kernels for kernels in map(kernels_at, LEVELS) if kernels.multiplies]


def test_products_take_bfloat16_and_no_rows(kernels: Native) -> None:
    if kernels.multiplies:
        packed = pack_bfloat16(torch.ones(32, 4).bfloat16())
        for inputs in (4, 64):
            weight = pack_bfloat16(torch.ones(32, inputs).bfloat16())
            assert kernels.linear(torch.empty(0, inputs).bfloat16(), weight, None, 32).shape == (0, 32)
        with pytest.raises(TypeError, match="the products are for bfloat16"):
            kernels.linear(torch.ones(1, 4), packed, None, 32)


def test_weights_that_do_not_fit_are_left_to_torch(kernels: Native) -> None:
    assert not kernels.takes(torch.empty(33, 64))
    assert not kernels.takes(torch.empty(32, 63))
    assert not kernels.takes_int8(torch.empty(33, 64, dtype=torch.int8))
    assert not kernels.takes_int8(torch.empty(32, 72, dtype=torch.int8))


@settings(max_examples=60)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (14, 2), (5, 1), (8, 1)]),
    size=st.sampled_from([16, 48, 64, 80, 128]),
    dtype=st.sampled_from(TYPES),
    format=st.sampled_from(["none", "int8", "fp8"]),
    lengths=st.lists(st.integers(1, 90) | st.sampled_from([64, 65, 200, 300]), min_size=1, max_size=5),
    block=st.sampled_from([1, 16, 32]),
    window=st.sampled_from([None, 1, 20]),
    cap=st.sampled_from([None, 3.0]),
    alibi=st.booleans(),
    chunk=st.sampled_from([None, 1, 7, 32]),
    sunk=st.booleans(),
    seed=st.integers(0, 9),
)
def test_paged_attention(
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    format: str,
    lengths: list[int],
    block: int,
    window: int | None,
    cap: float | None,
    alibi: bool,
    chunk: int | None,
    sunk: bool,
    seed: int,
    level: Native,
) -> None:
    """Rows of several lengths whose blocks lie anywhere, against the softmax of each row by itself."""
    torch.manual_seed(seed)
    count, kv_heads = heads
    columns = -(-max(lengths) // block)
    tables = torch.randperm(len(lengths) * columns).view(len(lengths), columns)
    scale = None if format == "none" else 0.05
    storage = torch.zeros(tables.numel(), block, 2 * kv_heads, size, dtype=storage_dtype(format, dtype))  # type: ignore[arg-type]
    cache = LayerCache(storage, scale, dtype, Scratch())
    cache.write(torch.arange(tables.numel() * block), torch.randn(tables.numel() * block, 2 * kv_heads, size).to(dtype))
    queries = torch.randn(len(lengths), count + 2 * kv_heads, size).to(dtype)
    bias = Alibi(count, 0, count, 1.0, False, torch.device("cpu")) if alibi else None
    sinks = torch.randn(kv_heads, count // kv_heads, 1, 1) * 3 if sunk else None
    scores = SoftmaxScores(size**-0.5, cap, bias, sinks)
    slopes = None if bias is None else bias.slopes
    out = torch.empty(len(lengths), count * size, dtype=dtype)
    logits = None if sinks is None else sinks.flatten()
    how = PagedHeads(count, kv_heads, size, 2 * kv_heads, size**-0.5, cap, window, slopes, chunk, logits)
    cache.attend(queries, PagedRows(tables, torch.tensor(lengths), block), how, out)
    expected = []
    for row, length in enumerate(lengths):
        seen = cache.read(tables[row])[:length].float().transpose(0, 1)
        mask = torch.zeros(1, 1, 1, length)
        first = max(0, length - (window or length), 0 if chunk is None else (length - 1) // chunk * chunk)
        mask[..., :first] = float("-inf")
        grouped = queries[row, :count].float().view(1, kv_heads, -1, size)
        expected.append(scores.one_query(grouped, seen[None, :kv_heads], seen[None, kv_heads:], mask).flatten())
    made, wanted = out.float(), torch.stack(expected)
    assert float((made - wanted).abs().max() / wanted.abs().max()) < (1e-5 if dtype is torch.float32 else 2**-6)


@settings(max_examples=40)
@given(
    size=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(TYPES),
    format=st.sampled_from(["none", "int8", "fp8"]),
    root=st.sampled_from([0, 1, 14, 62, 63, 64, 130, 700]),
    parents=st.lists(st.integers(-1, 61), min_size=1, max_size=63),
    others=st.lists(st.integers(1, 40), max_size=3),
    block=st.sampled_from([4, 16, 32]),
    seed=st.integers(0, 9),
)
def test_paged_attention_of_trees(
    size: int,
    dtype: torch.dtype,
    format: str,
    root: int,
    parents: list[int],
    others: list[int],
    block: int,
    seed: int,
    level: Native,
) -> None:
    """A row for each token of a tree, which sees its ancestors, between rows that see all before them."""
    torch.manual_seed(seed)
    parents = [parent % (index + 1) - 1 for index, parent in enumerate(parents)]
    heads, kv_heads, last = 4, 2, root + 1 + len(parents)
    lengths = [*others, *range(root + 1, last + 1), *others]
    tables = torch.randperm(len(others) * -(-40 // block) + -(-last // block)).tolist()
    columns = -(-last // block)
    rows = torch.zeros(len(lengths), max(columns, -(-40 // block)), dtype=torch.int64)
    rows[len(others) : len(lengths) - len(others), :columns] = torch.tensor(tables[:columns])
    for index in range(len(others)):
        own = torch.tensor(tables[columns + index * -(-40 // block) :][: -(-40 // block)])
        rows[index, : len(own)] = rows[len(lengths) - len(others) + index, : len(own)] = own
    scale = None if format == "none" else 0.05
    storage = torch.zeros(len(tables), block, 2 * kv_heads, size, dtype=storage_dtype(format, dtype))  # type: ignore[arg-type]
    cache = LayerCache(storage, scale, dtype, Scratch())
    slots = len(tables) * block
    cache.write(torch.arange(slots), torch.randn(slots, 2 * kv_heads, size).to(dtype))
    queries = torch.randn(len(lengths), heads + 2 * kv_heads, size).to(dtype)
    seen = torch.tensor([-1] * (len(others) + 1) + seen_slots(parents) + [-1] * len(others))
    out = torch.empty(len(lengths), heads * size, dtype=dtype)
    how = PagedHeads(heads, kv_heads, size, 2 * kv_heads, size**-0.5)
    cache.attend(queries, PagedRows(rows, torch.tensor(lengths), block, seen=seen), how, out)
    scores, expected = SoftmaxScores(size**-0.5, None, None, None), []
    for row, length in enumerate(lengths):
        mask, node = torch.zeros(1, 1, 1, length), row - len(others) - 1
        if 0 <= node < len(parents):
            mask[..., root + 1 :] = float("-inf")
            while node >= 0:
                mask[..., root + 1 + node], node = 0, parents[node]
        values = cache.read(rows[row])[:length].float().transpose(0, 1)
        grouped = queries[row, :heads].float().view(1, kv_heads, -1, size)
        expected.append(scores.one_query(grouped, values[None, :kv_heads], values[None, kv_heads:], mask).flatten())
    made, wanted = out.float(), torch.stack(expected)
    assert float((made - wanted).abs().max() / wanted.abs().max()) < (1e-5 if dtype is torch.float32 else 2**-6)


def test_every_e4m3_number_is_read(kernels: Native) -> None:
    """With one token, attention is that token's value."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[torch.tensor([127, 255])] = 0  # not-a-number
    storage = torch.stack((torch.zeros(256, dtype=torch.uint8), numbers)).view(1, 1, 2, 256)
    rows = PagedRows(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), 1)
    out = torch.empty(1, 256)
    kernels.attend(torch.zeros(1, 3, 256), rows, storage, 1.0, PagedHeads(1, 1, 256, 2, 1.0), out)
    assert torch.equal(out[0], numbers.view(torch.float8_e4m3fn).float())


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(TYPES),
    format=st.sampled_from(["int8", "fp8"]),
    scale=st.sampled_from([1.0, 0.0123, 2.0**-12, 37.5]),
    exponent=st.integers(-14, 12),
    seed=st.integers(0, 99),
)
def test_values_are_rounded_as_torch_does(
    kernels: Native, dtype: torch.dtype, format: str, scale: float, exponent: int, seed: int
) -> None:
    """Byte for byte: small and large values, halves between two numbers, and a slice of heads."""
    heads = (torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(seed)) * scale * 2.0**exponent).to(dtype)
    heads[0] = torch.arange(-96, 96).view(6, 32).to(dtype) * scale / 2
    values, slots = heads[:, 2:], torch.tensor([3, 0, 6, 1, 5])
    storage = torch.zeros(7, 4, 32, dtype=storage_dtype(format, dtype))  # type: ignore[arg-type]
    kernels.quantize_slots(storage, slots, values, scale)
    integers = storage.dtype is torch.int8
    expected = round_to_int8(values, scale) if integers else quantize_fp8(values, scale).view(torch.uint8)
    assert torch.equal(storage[slots], expected)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_scores_that_are_no_numbers_are_not_hidden(kernels: Native, cap: float | None) -> None:
    queries, storage = torch.zeros(2, 3, 16), torch.ones(1, 16, 2, 16)
    queries[0, 0, 5] = float("nan")
    rows = PagedRows(torch.zeros(2, 1, dtype=torch.int64), torch.full((2,), 3), 16)
    out = torch.empty(2, 16)
    kernels.attend(queries, rows, storage, 1.0, PagedHeads(1, 1, 16, 2, 1.0, cap), out)
    assert out[0].isnan().all()
    assert torch.allclose(out[1], torch.ones(16))


def test_rows_go_to_their_slots(kernels: Native) -> None:
    storage, heads = torch.zeros(10, 2, 16), torch.randn(3, 5, 16)
    kernels.write_slots(storage, torch.tensor([7, 0, 4]), heads[:, 3:])
    assert torch.equal(storage[[7, 0, 4]], heads[:, 3:])
    assert float(storage[[1, 2, 3, 5, 6, 8, 9]].abs().max()) == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_int4_weights_without_kernels_are_dequantised(
    wanted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning, unless it was asked for."""
    torch.manual_seed(0)
    codes, scales = torch.randint(-8, 8, (64, 64), dtype=torch.int8), torch.rand(64, 2)
    weight = (codes.view(64, 2, 32) * scales.unsqueeze(2)).flatten(1)
    packed = Int4Native().pack(Stored(pack_int4(codes), weights_scale=scales), torch.bfloat16)
    if wanted:
        monkeypatch.setattr(bindings, "_native", lambda: None)
    else:
        monkeypatch.setenv(compiler.VARIABLE, "torch")
    _warn_of_dequantising.cache_clear()
    place = Placement(torch.device("cpu"), torch.bfloat16)
    linear = Int4Native().load(
        Weights.of({f"x.{name}": t for name, t in packed.items()}), "x", (64, 64), place, bias=True
    )
    x = torch.randn(5, 64).bfloat16()
    near(linear(x), functional.linear(x.float(), weight.bfloat16().float()), torch.bfloat16)
    assert ("INT4 weights are dequantised" in caplog.text) == wanted
