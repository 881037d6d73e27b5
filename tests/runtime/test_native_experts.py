"""Mixtures of experts by kernels, against plain loops in float64 and against the routing in torch's operations."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.families import MIXTURES
from tests.runtime.converted import TOKENS, Families, computed, error
from tests.runtime.kernel_levels import kernels_at
from trtforge.runtime.architecture.spec_parts import MoeSpec
from trtforge.runtime.decoder.moe import route as route_by_torch
from trtforge.runtime.decoder.moe import routes_of
from trtforge.runtime.linears.int4_native import pack_words
from trtforge.runtime.linears.linear import Linear, matrix
from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.compiler import NATIVE, VARIABLE
from trtforge.runtime.native.expanded import ExpandedLayer, linear_expanded, row_scales
from trtforge.runtime.native.experts import (
    CAPACITY,
    Experts,
    Routes,
    Scoring,
    gate_pairs,
    mix,
    route,
    scale_rows_by_gate,
    widened,
)
from trtforge.runtime.native.recorder import Arena
from trtforge.runtime.native.tiles import Int8Layer, pack_bfloat16, pack_int8

SIZE, INNER = 32, 64
EXPANDS = (True, False) if kernels_at(NATIVE).multiplies_integers else (True,)
"""Ways to multiply INT4, INT8 and bfloat16 on this machine: in float32, and by instructions of their own."""
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@pytest.fixture(scope="module")
def kernels(level: Native) -> Native:
    return level


@st.composite
def mixtures(draw: st.DrawFn) -> MoeSpec:
    groups = draw(st.integers(1, 4))
    experts = groups * draw(st.integers(2, 9))
    top_groups = draw(st.integers(1, groups))
    kind = draw(st.sampled_from(["softmax", "sigmoid", "on_inputs"]))
    if kind == "on_inputs":
        groups = top_groups = 1
    return MoeSpec(
        num_experts=experts,
        first=0,
        local=experts,
        top_k=draw(st.integers(1, min(8, experts // groups * top_groups))),
        expert_size=INNER,
        renormalize=draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        scaling=draw(st.sampled_from([1.0, 2.5])),
        shared_size=0,
        sigmoid=kind == "sigmoid",
        on_inputs=kind == "on_inputs",
    )


@settings(max_examples=60)
@given(moe=mixtures(), rows=st.integers(1, 40), spread=st.sampled_from([0.5, 8.0]), seed=st.integers(0, 99))
def test_tokens_go_to_the_experts_that_torch_chooses(
    kernels: Native, moe: MoeSpec, rows: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, moe.num_experts, generator=generator) * spread
    bias = torch.randn(moe.num_experts, generator=generator) * 0.1 if moe.sigmoid else None
    expected, chosen = route_by_torch(moe, logits, bias)
    weights, experts = route(kernels, logits, bias, routes_of(moe))
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen(kernels: Native) -> None:
    moe = MoeSpec(6, 0, 6, 3, INNER, True, 1, 1, 1.0, 0)
    weights, experts = route(kernels, torch.tensor([[0.0, 1, 1, 0, 1, 1]]), None, routes_of(moe))
    assert experts.tolist() == [[1, 2, 4]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


def layers_of(kernels: Native, ups: Tensor, downs: Tensor) -> list[Linear]:
    def layer(up: Tensor, down: Tensor) -> Linear:
        first, second = matrix(up), matrix(down)
        return lambda x: second(kernels.gate(first(x), "silu", 1))

    return [layer(up, down) for up, down in zip(ups, downs, strict=True)]


def mixed(x: Tensor, weights: Tensor, chosen: Tensor, ups: Tensor, downs: Tensor, *, on_inputs: bool) -> Tensor:
    """The sum over each token's experts, of which those beyond `ups` are elsewhere, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (own, experts) in enumerate(zip(weights.double(), chosen.tolist(), strict=True)):
        for weight, expert in zip(own, experts, strict=True):
            if expert in range(len(ups)):
                taken = x[row].double() * (weight if on_inputs else 1.0)
                other, gate = (ups[expert].double() @ taken).chunk(2)
                made = downs[expert].double() @ (functional.silu(gate) * other)
                out[row] += made if on_inputs else made * weight
    return out


@pytest.mark.parametrize("dtype", EXACT)
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40) | st.just(2 * CAPACITY + 3),
    count=st.integers(1, 9),
    chosen=st.integers(1, 4),
    here=st.integers(1, 9),
    accumulate=st.booleans(),
    on_inputs=st.booleans(),
    seed=st.integers(0, 9),
)
def test_experts_compute_the_tokens_that_go_to_them(
    kernels: Native,
    dtype: torch.dtype,
    rows: int,
    count: int,
    chosen: int,
    here: int,
    accumulate: bool,
    on_inputs: bool,
    seed: int,
) -> None:
    """`here`: so many experts are on this rank, from the second on where there are more."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, SIZE, generator=generator).to(dtype)
    here, chosen = min(here, count), min(chosen, count)
    first = min(1, count - here)
    ups = (torch.randn(here, 2 * INNER, SIZE, generator=generator) / 4).to(dtype)
    downs = (torch.randn(here, SIZE, INNER, generator=generator) / 4).to(dtype)
    weights = torch.rand(rows, chosen, generator=generator)
    experts = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(rows)])
    own = Experts.recorded(layers_of(kernels, ups, downs), SIZE, dtype, Arena())
    assert own is not None
    before = torch.randn(rows, SIZE, generator=generator).to(dtype)
    out = before.clone()
    mix(kernels, x, (weights, experts), own, out, first=first, accumulate=accumulate, on_inputs=on_inputs)
    expected = mixed(x, weights, experts - first, ups, downs, on_inputs=on_inputs)
    expected += before.double() if accumulate else 0
    assert (out.double() - expected).abs().max() <= EXACT[dtype] * max(1.0, float(expected.abs().max()))


def test_experts_share_the_memory_of_their_results(kernels: Native) -> None:
    arena, generator = Arena(), torch.Generator().manual_seed(0)
    ups = torch.randn(3, 2 * INNER, SIZE, generator=generator)
    downs = torch.randn(3, SIZE, INNER, generator=generator)
    made = [Experts.recorded(layers_of(kernels, ups, downs), SIZE, torch.float32, arena) for _ in range(2)]
    places = {each.gathered.data_ptr() for each in made if each is not None}
    results = {expert.computed for each in made if each is not None for expert in each.entries}
    assert len(made) == 2
    assert len(places) == len(results) == 1


def test_what_torch_computes_is_no_expert_of_the_kernels(kernels: Native) -> None:
    def by_torch(x: Tensor) -> Tensor:
        return activate(kernels, x, "silu") + 1

    assert Experts.recorded([by_torch], SIZE, torch.float32, Arena()) is None


def test_any_kernels_of_rows_are_layers_of_an_expert(kernels: Native) -> None:
    """A norm, an activation that counts numbers, and more rows than an expert computes at once."""
    weight = torch.rand(SIZE)
    layer = Experts.recorded(
        [lambda x: activate(kernels, kernels.rms_norm(x, weight, 1e-5), "silu")], SIZE, torch.float32, Arena()
    )
    assert layer is not None
    for rows in (3, CAPACITY + 5, 1):
        x = torch.randn(rows, SIZE)
        out = torch.full_like(x, float("nan"))
        routed = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int64)
        mix(kernels, x, routed, layer, out, first=0, accumulate=False, on_inputs=False)
        torch.testing.assert_close(out, functional.silu(functional.rms_norm(x, (SIZE,), weight, 1e-5)))


@pytest.mark.parametrize("expands", EXPANDS)
@pytest.mark.parametrize("rows", [1, 40, CAPACITY + 40])
def test_experts_of_several_formats_are_in_one_mixture(rows: int, expands: bool) -> None:
    """INT4 with a scale of inputs, INT8 and bfloat16, which need more memory one after another."""
    kernels = kernels_at(NATIVE)
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(-8, 8, (256, 256), generator=generator, dtype=torch.int8) for _ in range(3)]
    prequant = (torch.rand(256, generator=generator) + 0.5).bfloat16()
    scales = torch.rand(8, 2, 32, generator=generator) / 100
    words = pack_words(codes[1])
    layer = Int8Layer(*pack_int8(codes[2]), torch.ones(256), torch.full((256,), 1e-4), None, 0.02)
    by_group = scales.transpose(1, 2).reshape(256, 2).repeat_interleave(128, 1)
    dense = (codes[0].float() / 100).bfloat16()
    packed = pack_bfloat16(dense)
    expanded = (
        ExpandedLayer("bfloat16", packed, 256),
        ExpandedLayer("int4", words, 256, scales=scales, prequant=prequant.float()),
        ExpandedLayer("int8", layer.weight, 256, row_scales(layer.scales), inputs="int8", activation_scale=0.02),
    )

    def by_expansion(layer: ExpandedLayer) -> Callable[[Tensor], Tensor]:
        return lambda x: linear_expanded(kernels, x, layer)

    products = [
        lambda x: kernels.linear(x, packed, None, 256),
        lambda x: kernels.linear_int4(x, words, scales, None, prequant),
        lambda x: kernels.linear_int8(x, layer),
    ]
    experts = Experts.recorded(
        [by_expansion(each) for each in expanded] if expands else products,
        256,
        torch.bfloat16,
        Arena(),
    )
    assert experts is not None
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    out = torch.full((rows, 256), float("nan"), dtype=torch.bfloat16)
    routed = torch.tensor([[0.5, 0.25, 0.25]]).expand(rows, -1).contiguous(), torch.arange(3).repeat(rows, 1)
    mix(kernels, x, routed, experts, out, first=0, accumulate=False, on_inputs=False)
    by_int4 = (x.float() * prequant.float()) @ (codes[1].float() * by_group).t()
    by_int8 = (x.float() / 0.02).round().clamp(-128, 127) @ codes[2].float().t() * 1e-4
    expected = 0.5 * (x.float() @ dense.float().t()) + 0.25 * by_int4 + 0.25 * by_int8
    assert (out.float() - expected).abs().max() <= 2**-6 * expected.abs().max()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sigmoid_of_chosen"])
def test_of_experts_without_a_chance_none_is_taken_twice(kernels: Native, scoring: Scoring) -> None:
    logits = torch.full((2, 8), -torch.inf)
    logits[0, 3] = 1.0
    logits[1] = torch.nan
    _, chosen = route(kernels, logits, None, Routes(8, 4, 4, 2, scoring, False, 1.0))
    for row in chosen.tolist():
        assert len(set(row)) == 4, row
        assert len({expert // 2 for expert in row}) == 2, "of two groups"
    assert chosen[0, 0] == 3


def test_numbers_that_are_none_stay_so_and_no_expert_is_taken_twice(kernels: Native) -> None:
    moe = MoeSpec(6, 0, 6, 3, INNER, True, 1, 1, 1.0, 0)
    weights, experts = route(kernels, torch.full((1, 6), float("nan")), None, routes_of(moe))
    assert experts.tolist() == [[0, 1, 2]]
    assert weights.isnan().all()
    pairs = torch.tensor([[1.0, float("nan"), float("nan"), 1.0, 1.0, 2.0]])
    assert gate_pairs(kernels, pairs, 7.0, 1.7).isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("dtype", EXACT)
@given(rows=st.integers(1, 30), size=st.integers(1, 700), seed=st.integers(0, 9))
def test_gates_of_experts(kernels: Native, dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = (torch.randn(rows, 2 * size, generator=generator) * 4).to(dtype)
    gate, up = pairs.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=5.0), up.clamp(-5.0, 5.0)
    expected = (up + 1) * gate * torch.sigmoid(gate * 1.7)
    made = gate_pairs(kernels, pairs, 5.0, 1.7).double()
    torch.testing.assert_close(made, expected, rtol=EXACT[dtype], atol=1e-6)
    x, weight = torch.randn(rows, size, generator=generator).to(dtype), torch.randn(1, size, generator=generator)
    weight = (weight / size**0.5).to(dtype)
    y = torch.randn(rows, 3, generator=generator).to(dtype)
    scaled = y.double() * (x.double() @ weight.double().t()).sigmoid()
    made = scale_rows_by_gate(kernels, y.clone(), x, weight).double()
    torch.testing.assert_close(made, scaled, rtol=EXACT[dtype], atol=1e-6)
    assert torch.equal(widened(kernels, x), x.float())


@pytest.mark.parametrize("name", MIXTURES)
def test_networks_without_kernels(families: Families, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operations, as on a GPU, give what `transformers` computes."""
    monkeypatch.setenv(VARIABLE, "torch")
    family = families(name)
    assert error(computed(family.checkpoint(), TOKENS)[0], family.logits(TOKENS)) < 1e-4
