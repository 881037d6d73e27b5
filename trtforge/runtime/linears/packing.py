"""Packs a checkpoint's rank file into the tensors that kernels compute with, the contents of an engine's rank file."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.eagle_checkpoint import eagle_rank_shapes
from trtforge.formats.medusa import rank_shapes
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.runtime.architecture.layout import (
    EMBEDDING,
    LM_HEAD,
    GatedSlot,
    LinearSlot,
    Slot,
    TensorSlot,
    embedding_slots,
    head_slots,
    layer_name,
    layer_slots,
    rank_slots,
    router_name,
)
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.architecture.spec_parts import LatentSpec
from trtforge.runtime.linears.kernels import DTYPES, Kernels, kernel_of
from trtforge.runtime.linears.linear import Stored, merged
from trtforge.runtime.linears.stored import take_experts, take_linear
from trtforge.runtime.linears.weights import Weights


def pack_rank(
    config: CheckpointConfig, index: int, tensors: Weights | Mapping[str, Tensor], kernels: Kernels, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Pack the tensors of rank `index` of a checkpoint for `kernels`, ready for a safetensors file.

    mlp.fc and mlp.gate become mlp.fc_gate if they can share their scales; a stack of experts becomes one layer per
    expert, as mlp.fc.0. Raises ForgeError naming a tensor that is missing, unexpected or of the wrong shape.
    """
    source = tensors if isinstance(tensors, Weights) else Weights.of(tensors, f"rank {index}")
    packing = Packing(config, index, source, kernels, dtype)
    packed: dict[str, Tensor] = {}
    for layer in range(packing.spec.num_layers):
        packed |= packing.layer(layer)
    packed |= packing.embedding() | packing.head()
    source.finish()
    return {name: tensor.contiguous() for name, tensor in packed.items()}


def require_rank(config: CheckpointConfig, index: int, source: Weights) -> None:
    """Raises ForgeError as `pack_rank` does, from names, shapes and dtypes alone; `source` needs no values."""
    spec = DecoderSpec.of(config, index)
    _Check(spec, source, Kernels(), DTYPES[config.dtype]).add(rank_slots(spec, sparse_layers(spec, source)))
    for name, shape in _drafting_shapes(config).items():
        source.take_floating(name, *shape)
    source.finish()


def _drafting_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of Medusa heads and of EAGLE networks in every rank file."""
    return rank_shapes(config) | eagle_rank_shapes(config)


def sparse_layers(spec: DecoderSpec, weights: Weights) -> frozenset[int]:
    """The layers that have experts. Families configure this differently, so detect router tensors."""
    return frozenset(index for index in range(spec.num_layers) if weights.has(router_name(index)))


class Packing:
    """Packs one rank part by part. Skips draft heads and networks, which compilation gathers from all ranks."""

    def __init__(
        self, config: CheckpointConfig, index: int, source: Weights, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        self.spec = DecoderSpec.of(config, index)
        self.sparse = sparse_layers(self.spec, source)
        for name in _drafting_shapes(config):
            source.leave(name)
        packed_types = (dtype, DTYPES[config.dtype])
        self._source, self._kernels, self._dtype = source, kernels, dtype
        self._rounding = max(torch.finfo(type_).eps for type_ in packed_types)  # relative, of the coarser type

    def layer(self, index: int) -> dict[str, Tensor]:
        """The packed tensors of one layer of the rank's stage."""
        part = _Part(self.spec, self._source, self._kernels, self._dtype)
        part.add(layer_slots(self.spec, index, self.sparse))
        if self.spec.latent and self.spec.network.absorbed_query:
            part.absorb(f"{layer_name(index)}.attention", self._rounding)
        return part.packed

    def embedding(self) -> dict[str, Tensor]:
        """The packed tensors before the layers."""
        return self._packed(embedding_slots(self.spec))

    def head(self) -> dict[str, Tensor]:
        """The packed tensors after the layers."""
        return self._packed(head_slots(self.spec))

    def _packed(self, slots: Iterable[Slot]) -> dict[str, Tensor]:
        part = _Part(self.spec, self._source, self._kernels, self._dtype)
        part.add(slots)
        return part.packed


class _Part:
    """Collects packed tensors."""

    def __init__(self, spec: DecoderSpec, source: Weights, kernels: Kernels, dtype: torch.dtype) -> None:
        self.packed: dict[str, Tensor] = {}
        self._spec = spec
        self._source = source
        self._kernels = kernels
        self._dtype = dtype

    def add(self, slots: Iterable[Slot]) -> None:
        """Pack the slots in order."""
        for slot in slots:
            self._add(slot)

    def _add(self, slot: Slot) -> None:
        """Take a slot's tensors from the source and pack them."""
        match slot:
            case TensorSlot():
                self._add_tensor(slot)
            case GatedSlot():
                self._add_gated(slot)
            case LinearSlot() if slot.experts:
                for index, expert in enumerate(take_experts(self._spec, self._source, slot)):
                    self._add_linear(slot, expert, f"{slot.module}.{index}")
            case LinearSlot() if slot.module == LM_HEAD and self._is_tied(slot):
                table = self._source.take_floating(EMBEDDING, slot.out, slot.inputs)
                self._add_linear(slot, Stored(table.clone()), slot.module)
            case LinearSlot():
                self._add_linear(slot, take_linear(self._spec, self._source, slot), slot.module)

    def absorb(self, attention: str, rounding: float) -> None:
        """Check latent attention's fused_q_proj, then drop it: it is the product of q_b_proj and kv_b_proj.

        TensorRT-LLM uses it in the generation phase. Rounded to the checkpoint's type, it is less exact than the two.
        """
        assert self._spec.latent is not None
        stored = self.packed.pop(f"{attention}.fused_q_proj").float()
        product = _fused_query(
            self._spec.latent, self.packed[f"{attention}.q_b_proj"], self.packed[f"{attention}.kv_b_proj"]
        )
        if float((stored - product).abs().max()) > max(4 * rounding, 1e-5) * float(product.abs().max()):
            raise ForgeError(
                f"{self._source.where}: {attention}.fused_q_proj is not the product of q_b_proj and kv_b_proj",
                hint="Convert the checkpoint again.",
            )

    def _add_tensor(self, slot: TensorSlot) -> None:
        if slot.shape == (1,):
            self.packed[slot.name] = self._source.take_scalar(slot.name)
        else:
            tensor = self._source.take_floating(slot.name, *slot.shape)
            self.packed[slot.name] = tensor.to(torch.float32 if slot.exact else self._dtype)

    def _add_linear(self, slot: LinearSlot, stored: Stored, name: str) -> None:
        """Pack one matrix under `name` with the kernel of the slot's module."""
        parts = kernel_of(self._spec, self._kernels, slot.module).pack(stored, self._dtype)
        self.packed |= {f"{name}.{part}": tensor for part, tensor in parts.items()}

    def _add_gated(self, slot: GatedSlot) -> None:
        fc, gate = (take_linear(self._spec, self._source, part) for part in (slot.fc, slot.gate))
        same_kind = self._spec.format_of(slot.fc.module) == self._spec.format_of(slot.gate.module)
        both = merged((fc, gate)) if same_kind else None
        if both:
            self._add_linear(slot.fc, both, slot.both.module)
        else:
            self._add_linear(slot.fc, fc, slot.fc.module)
            self._add_linear(slot.gate, gate, slot.gate.module)

    def _is_tied(self, slot: LinearSlot) -> bool:
        """Whether lm_head is tied to this rank's embedding: it is missing and the shapes are equal, as TensorRT-LLM's
        loader decides."""
        tables = (table for table in embedding_slots(self._spec) if isinstance(table, TensorSlot))
        shape = next((table.shape for table in tables if table.name == EMBEDDING), None)
        return shape == (slot.out, slot.inputs) and not self._source.has(f"{LM_HEAD}.weight")


class _Check(_Part):
    """Takes every tensor and packs none."""

    def _add_linear(self, slot: LinearSlot, stored: Stored, name: str) -> None:
        pass

    def _add_gated(self, slot: GatedSlot) -> None:
        for part in (slot.fc, slot.gate):
            take_linear(self._spec, self._source, part)


def _fused_query(latent: LatentSpec, q_b_proj: Tensor, kv_b_proj: Tensor) -> Tensor:
    """float32 rows of every head: its query projected to the latent space, then its rotated part.

    Source: tensorrt_llm/models/deepseek_v2/convert.py.
    """
    queries = q_b_proj.float().unflatten(0, (-1, latent.head_size))
    keys = kv_b_proj.float()[: len(queries) * latent.nope_size].unflatten(0, (len(queries), -1))
    against_latent = torch.einsum("hdq,hdk->hkq", queries[:, : latent.nope_size], keys)
    return torch.cat((against_latent, queries[:, latent.nope_size :]), dim=1).flatten(0, 1)
