"""Linear attention (gated DeltaNet): a short convolution over the tokens, the gated delta rule, a gated norm.

Numerics: transformers/models/qwen3_next/modeling_qwen3_next.py, Qwen3NextGatedDeltaNet. It has no KV cache and no
position embedding: the layer keeps a state for each sequence. Its matrices are not quantised.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.positions import LayerSpec
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.architecture.spec_parts import LinearSpec
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.collective import Collective
from trtforge.runtime.decoder.delta_rule import Tokens, one_token, sequence
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.sequence_states import SequenceStates, Span, State
from trtforge.runtime.linears.linear import Linear, matrix
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.convolution import convolve
from trtforge.runtime.native.linear_attention import delta_inputs, norm_gated


@dataclass(frozen=True)
class LinearAttention:
    """`qkvz` and `ba` are input projections, `kernel` (channels, 1, inputs) the convolution's weight.

    `decay` and `bias` (value heads) turn a token's inputs into log decays; `norm` (value size) is the weight of the
    output's norm.
    """

    sizes: LinearSpec
    qkvz: Linear
    ba: Linear
    kernel: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    out: Linear
    epsilon: float
    ranks: Collective
    states: SequenceStates

    def __call__(self, x: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: LayerCache) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), summed over ranks. Padding gives zeros."""
        sizes = self.sizes
        inputs, gates = self._projected(x)
        projected = self.ba(x)
        found = x.new_zeros(len(x), sizes.value_heads, sizes.value_size)
        spans = batch.spans
        self.states.forget(spans.taken)
        for depth, wave in enumerate(spans.waves):
            single = [span for span in wave if len(span) == 1]
            if single:
                self._generate(single, inputs, projected, found, more=depth > 0)
            for span in wave:
                if len(span) > 1:
                    self._compute(span, inputs, projected, found, more=depth > 0)
        return self.ranks.all_reduce(self.out(self._normed(found, gates)))

    def _generate(self, spans: list[Span], inputs: Tensor, projected: Tensor, found: Tensor, *, more: bool) -> None:
        """Compute one token of each sequence."""
        before = [self.states.before(span) for span in spans]
        at = torch.tensor([span.first for span in spans], device=inputs.device)
        window = torch.cat((torch.stack([state.inputs for state in before]), inputs[at].unsqueeze(1)), dim=1)
        tokens = self._tokens(self._convolved(window).squeeze(1), projected[at])
        # The state before a token is not needed afterwards, except the shared empty state and one before a draft.
        spent = [not more and span.start > 0 for span in spans]
        outputs, memories = one_token(tokens, [state.memory for state in before], spent)
        found[at] = outputs.to(found.dtype)
        for row, (span, memory) in enumerate(zip(spans, memories, strict=True)):
            self.states.keep(span, State(window[row, 1:].clone(), memory), more=more)

    def _compute(self, span: Span, inputs: Tensor, projected: Tensor, found: Tensor, *, more: bool) -> None:
        """Compute several tokens of one sequence."""
        before, own = self.states.before(span), slice(span.first, span.end)
        window = torch.cat((before.inputs, inputs[own]))
        tokens = self._tokens(self._convolved(window.unsqueeze(0)).squeeze(0), projected[own])
        outputs, memory = sequence(tokens, before.memory)
        found[own] = outputs.to(found.dtype)
        self.states.keep(span, State(window[len(span) :].clone(), memory), more=more)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values (tokens, channels), and output gates (tokens, value heads, value size)."""
        sizes, shared = self.sizes, self.sizes.values // self.sizes.key_heads
        by_head = self.qkvz(x).view(len(x), sizes.key_heads, -1)
        queries, keys, values, gates = by_head.split([sizes.key_size, sizes.key_size, shared, shared], dim=2)
        inputs = torch.cat((queries.flatten(1), keys.flatten(1), values.flatten(1)), dim=1)
        return inputs, gates.reshape(len(x), sizes.value_heads, sizes.value_size)

    @cached_property
    def _taps(self) -> Tensor:
        """The convolution's weight in float32, (inputs, channels)."""
        return self.kernel.squeeze(1).t().float().contiguous()

    def _convolved(self, window: Tensor) -> Tensor:
        """Convolve and activate (rows, earlier and own tokens, channels) to (rows, own tokens, channels)."""
        kernels = native_for(window.device, window.dtype)
        if kernels is not None:
            return convolve(kernels, window, self._taps)
        if window.shape[1] == self.sizes.kernel:  # one token: one sum
            summed = (window.float() * self._taps).sum(dim=1, keepdim=True)
            return functional.silu(summed.to(window.dtype))
        count = window.shape[1] - self.sizes.kernel + 1
        summed = window[:, :count].float() * self._taps[0]
        for first, tap in enumerate(self._taps[1:], start=1):  # not conv1d: cuDNN multiplies float32 as TF32
            summed.addcmul_(window[:, first : first + count].float(), tap)
        return functional.silu(summed.to(window.dtype))

    def _tokens(self, convolved: Tensor, projected: Tensor) -> Tokens:
        """The delta rule's inputs, from the convolution's outputs (tokens, channels) and those of `ba`."""
        sizes = self.sizes
        kernels = native_for(convolved.device, convolved.dtype)
        if kernels is not None:
            of_heads = sizes.key_heads, sizes.key_size, sizes.value_size
            return Tokens(*delta_inputs(kernels, convolved, projected, self.decay, self.bias, of_heads))
        rates, steps = (part.flatten(1) for part in projected.unflatten(1, (sizes.key_heads, -1)).chunk(2, dim=2))
        decays = -self.decay * functional.softplus(steps.float() + self.bias)
        queries, keys, values = convolved.split([sizes.keys, sizes.keys, sizes.values], dim=1)
        queries, keys = (each.unflatten(1, (sizes.key_heads, sizes.key_size)) for each in (queries, keys))
        values = values.unflatten(1, (sizes.value_heads, sizes.value_size))
        return Tokens.of(queries, keys, values, rates.sigmoid(), decays)

    def _normed(self, found: Tensor, gates: Tensor) -> Tensor:
        """(tokens, value heads x value size): RMS norm of each head, times an activated gate."""
        kernels = native_for(found.device, found.dtype)
        if kernels is not None and self.norm.dtype is found.dtype:
            return norm_gated(kernels, found, gates, self.norm, self.epsilon).flatten(1)
        values = functional.rms_norm(found.float(), found.shape[-1:], eps=self.epsilon).to(found.dtype)
        return (self.norm * values * functional.silu(gates.float())).to(found.dtype).flatten(1)


def load_linear(loader: Loader, name: str, layer: LayerSpec) -> LinearAttention:
    """The linear attention of a layer."""
    spec, sizes, place = loader.spec, loader.spec.linear, loader.place
    assert sizes is not None, "only networks with linear attention load it"
    empty = State(
        torch.zeros(sizes.kernel - 1, sizes.channels, dtype=place.dtype, device=place.device),
        torch.zeros(sizes.value_heads, sizes.key_size, sizes.value_size, device=place.device),
    )
    return LinearAttention(
        sizes=sizes,
        qkvz=matrix(loader.tensor(f"{name}.in_proj_qkvz.weight")),
        ba=matrix(loader.tensor(f"{name}.in_proj_ba.weight")),
        kernel=loader.tensor(f"{name}.conv1d.weight").unsqueeze(1),
        decay=loader.tensor(f"{name}.A_log").float().exp(),
        bias=loader.tensor(f"{name}.dt_bias").float(),
        norm=loader.tensor(f"{name}.norm.weight"),
        out=matrix(loader.tensor(f"{name}.out_proj.weight")),
        epsilon=spec.norm_epsilon,
        ranks=loader.ranks,
        states=SequenceStates(empty),
    )
