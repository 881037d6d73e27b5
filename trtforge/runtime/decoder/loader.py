"""Loads the packed tensors of a rank to its device, one part of the network at a time."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtforge.runtime.adapters.rank_adapters import RankAdapters
from trtforge.runtime.architecture.layout import GatedSlot, LinearSlot, Slot, TensorSlot, rank_slots
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.collective import Collective
from trtforge.runtime.decoder.norms import LayerNorm, Norm, RmsNorm, zero_centred
from trtforge.runtime.linears.kernels import Kernels, kernel_of
from trtforge.runtime.linears.linear import Linear, Placement
from trtforge.runtime.linears.packing import sparse_layers
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.recorder import Arena


@dataclass(frozen=True)
class Loader:
    """Loads parts by their names in the checkpoint. `arena`: memory that the experts of all layers share."""

    spec: DecoderSpec
    kernels: Kernels
    weights: Weights
    place: Placement
    ranks: Collective
    linears: dict[str, LinearSlot]
    tensors: dict[str, TensorSlot]
    adapters: RankAdapters | None = None
    arena: Arena = field(default_factory=Arena)

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        kernels: Kernels,
        weights: Weights,
        place: Placement,
        ranks: Collective,
        sparse: Collection[int] | None = None,
        adapters: RankAdapters | None = None,
    ) -> "Loader":
        """The loader of one rank. `sparse`: layers that have experts; required if `weights` are only a part."""
        slots = list(rank_slots(spec, sparse_layers(spec, weights) if sparse is None else sparse))
        linears = {slot.module: slot for slot in _linears(slots)}
        tensors = {slot.name: slot for slot in slots if isinstance(slot, TensorSlot)}
        return cls(spec, kernels, weights, place, ranks, linears, tensors, adapters)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the compute type, or in float32 if its slot is `exact`."""
        slot = self.tensors[name]
        tensor = self.weights.take(name, *slot.shape)
        return tensor.to(self.place.device, torch.float32 if slot.exact else self.place.dtype)

    def linear(self, module: str, *, bias: bool = True) -> Linear:
        """A linear layer; without `bias`, the caller adds its bias."""
        return self._adapted(module, self._packed(self.linears[module], module, bias=bias))

    def row_parallel(self, module: str, *, bias_in_parts: bool = False) -> Linear:
        """A linear layer summed over ranks. The bias is added after the sum; `bias_in_parts`: by each rank before."""
        if self.spec.tp == 1:
            return self.linear(module)
        ranks, slot = self.ranks, self.linears[module]
        linear = self.linear(module, bias=bias_in_parts)
        if bias_in_parts or not slot.bias:
            return lambda x: ranks.all_reduce(linear(x))
        bias = self.weights.take(f"{module}.bias", slot.out).to(self.place.device, self.place.dtype)
        return lambda x: ranks.all_reduce(linear(x)).add_(bias)

    def pair(self, first: str, second: str) -> Linear:
        """Two linear layers with the same input and size; their outputs are halves of the result."""
        slot = GatedSlot(self.linears[first], self.linears[second])
        if not self.weights.has(f"{slot.both.module}.weight"):
            fc, gate = self.linear(first), self.linear(second)
            return self._adapted(slot.both.module, lambda x: torch.cat((fc(x), gate(x)), dim=1))
        return self._adapted(slot.both.module, self._packed(slot.fc, slot.both.module, out=slot.both.out))

    def experts(self, module: str) -> list[Linear]:
        """A stack of experts, one linear layer for each."""
        slot = self.linears[module]
        return [self._packed(slot, f"{module}.{index}") for index in range(slot.experts)]

    def norm(self, name: str) -> Norm:
        """A norm over the last dimension, of the network's kind."""
        weight = self.tensor(f"{name}.weight")
        if self.spec.network.zero_centred:
            return zero_centred(weight, self.spec.norm_epsilon)
        if self.spec.network.norm == "rms":
            return RmsNorm(weight, self.spec.norm_epsilon)
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self.tensors else None
        return LayerNorm(weight, bias, self.spec.norm_epsilon)

    def _adapted(self, name: str, linear: Linear) -> Linear:
        return linear if self.adapters is None else self.adapters.adapted(name, linear)

    def _packed(self, slot: LinearSlot, name: str, *, out: int | None = None, bias: bool = True) -> Linear:
        kernel = kernel_of(self.spec, self.kernels, slot.module)
        return kernel.load(self.weights, name, (out or slot.out, slot.inputs), self.place, bias=bias)


def _linears(slots: list[Slot]) -> list[LinearSlot]:
    found: list[LinearSlot] = []
    for slot in slots:
        if isinstance(slot, GatedSlot):
            found += [slot.fc, slot.gate]
        elif isinstance(slot, LinearSlot):
            found.append(slot)
    return found
