"""The decoder of one rank: embedding, layers, final norm and logits, for packed tokens and a paged cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.attention import Attention, Batch, LayerCache, Scratch
from trtforge.runtime.collective import Collective
from trtforge.runtime.kernels import Kernels, embedding_shape, kernel_of
from trtforge.runtime.linear import Linear, Place
from trtforge.runtime.rotary import Rotary, rotate
from trtforge.runtime.spec import DecoderSpec
from trtforge.runtime.weights import Weights

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """The parts of one decoder layer. Row-parallel linears already sum over ranks and add their bias."""

    input_norm: Norm
    qkv: Linear
    dense: Linear
    post_norm: Norm
    mlp: Linear


class Decoder:
    """Computes steps. Takes the packed tensors of `pack_rank`; each is used and none may be left."""

    def __init__(
        self, spec: DecoderSpec, kernels: Kernels, weights: Weights, place: Place, longest: int, ranks: Collective
    ) -> None:
        self.spec = spec
        self.place = place
        self._ranks = ranks
        self._rotary = Rotary(spec.rotary, longest, place.device)
        self._attention = Attention(spec.num_heads, spec.num_kv_heads, spec.head_size)
        loader = _Loader(spec, kernels, weights, place, ranks)
        self._layers = [loader.layer(f"transformer.layers.{index}") for index in range(spec.num_layers)]
        self._kv_scales = [loader.kv_scale(f"transformer.layers.{index}") for index in range(spec.num_layers)]
        self._embedding = loader.embedding() if spec.first else None
        self._final_norm = loader.norm("transformer.ln_f") if spec.last else None
        self._lm_head = loader.linear("lm_head", spec.vocab_share, spec.hidden_size) if spec.last else None
        weights.finish()

    def new_cache(self, num_blocks: int, tokens_per_block: int) -> list[LayerCache]:
        """An empty cache for every layer. Zeroed: what a mask hides must still be finite."""
        spec = self.spec
        shape = (num_blocks, tokens_per_block, 2 * spec.num_kv_heads, spec.head_size)
        dtype = torch.uint8 if spec.fp8_kv_cache else self.place.dtype
        scratch = Scratch()
        return [
            LayerCache(torch.zeros(shape, dtype=dtype, device=self.place.device), scale, self.place.dtype, scratch)
            for scale in self._kv_scales
        ]

    def forward(self, batch: Batch, cache: list[LayerCache]) -> Tensor | None:
        """float32 logits (wanted rows, vocabulary) on rank 0, None on the others."""
        spec, place = self.spec, self.place
        if self._embedding is not None:
            hidden = self._embedding(batch.tokens)
        else:
            empty = torch.empty(len(batch.tokens), spec.hidden_size, dtype=place.dtype, device=place.device)
            hidden = self._ranks.receive_hidden(empty)
        cos, sin = self._rotary.cos_sin(batch.positions, place.dtype)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            heads = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, spec.head_size)
            rotate(heads[:, : spec.num_heads + spec.num_kv_heads], cos, sin)
            hidden = hidden + layer.dense(self._attention(heads, batch, layer_cache))
            hidden = hidden + layer.mlp(layer.post_norm(hidden))
        part = None
        if self._lm_head is not None and self._final_norm is not None:
            all_wanted = batch.wanted == len(batch.slots)
            wanted = hidden if all_wanted else hidden.index_select(0, batch.logit_rows)
            part = self._lm_head(self._final_norm(wanted))[: batch.wanted] if batch.wanted else None
        else:
            self._ranks.send_hidden(hidden)
        if batch.wanted == 0:
            return None
        logits = self._ranks.gather_logits(part, batch.wanted, spec.vocab_share, hidden)
        return None if logits is None else logits[:, : spec.vocab_size].float()


@dataclass(frozen=True)
class _Loader:
    """Builds the parts of a rank from its packed tensors."""

    spec: DecoderSpec
    kernels: Kernels
    weights: Weights
    place: Place
    ranks: Collective

    def linear(self, module: str, out: int, inputs: int, *, bias: bool = True) -> Linear:
        kernel = kernel_of(self.spec, self.kernels, module)
        return kernel.load(self.weights, module, (out, inputs), self.place, bias=bias)

    def row_parallel(self, module: str, out: int, inputs: int) -> Linear:
        """Each rank gives a part of the sum; the bias is added once, after it."""
        if self.spec.tp == 1:
            return self.linear(module, out, inputs)
        bias = None
        if self.weights.has(f"{module}.bias"):
            bias = self.weights.take(f"{module}.bias", out).to(self.place.device, self.place.dtype)
        linear, ranks = self.linear(module, out, inputs, bias=False), self.ranks
        if bias is None:
            return lambda x: ranks.all_reduce(linear(x))
        return lambda x: ranks.all_reduce(linear(x)).add_(bias)

    def norm(self, module: str) -> Norm:
        spec = self.spec
        weight = self.weights.take(f"{module}.weight", spec.hidden_size).to(self.place.device, self.place.dtype)
        return lambda x: functional.rms_norm(x, (spec.hidden_size,), weight, spec.norm_epsilon)

    def layer(self, name: str) -> Layer:
        spec = self.spec
        return Layer(
            input_norm=self.norm(f"{name}.input_layernorm"),
            qkv=self.linear(f"{name}.attention.qkv", spec.qkv_rows, spec.hidden_size),
            dense=self.row_parallel(f"{name}.attention.dense", spec.hidden_size, spec.num_heads * spec.head_size),
            post_norm=self.norm(f"{name}.post_layernorm"),
            mlp=self.gated_mlp(f"{name}.mlp"),
        )

    def gated_mlp(self, name: str) -> Linear:
        """SwiGLU. TensorRT-LLM's `fc` is what HF calls gate_proj and passes the SiLU, its `gate` is HF's up_proj."""
        spec, inner = self.spec, self.spec.intermediate_size
        proj = self.row_parallel(f"{name}.proj", spec.hidden_size, inner)
        if not self.weights.has(f"{name}.fc_gate.weight"):
            fc = self.linear(f"{name}.fc", inner, spec.hidden_size)
            gate = self.linear(f"{name}.gate", inner, spec.hidden_size)
            return lambda x: proj(functional.silu(fc(x)).mul_(gate(x)))
        both = self.linear(f"{name}.fc_gate", 2 * inner, spec.hidden_size)

        def mlp(x: Tensor) -> Tensor:
            fc_gate = both(x)
            return proj(functional.silu(fc_gate[:, :inner]).mul_(fc_gate[:, inner:]))

        return mlp

    def kv_scale(self, layer: str) -> float | None:
        if not self.spec.fp8_kv_cache:
            return None
        return float(self.weights.take_scalar(f"{layer}.attention.kv_cache_scaling_factor"))

    def embedding(self) -> Callable[[Tensor], Tensor]:
        spec, ranks = self.spec, self.ranks
        name = "transformer.vocab_embedding.weight"
        table = self.weights.take(name, *embedding_shape(spec)).to(self.place.device, self.place.dtype)
        match spec.embedding:
            case "replicated":
                return lambda tokens: functional.embedding(tokens, table)
            case "hidden":
                return lambda tokens: ranks.all_gather(functional.embedding(tokens, table))
            case "vocab":
                return lambda tokens: ranks.all_reduce(_own_rows(tokens, table, spec.rank.tp_rank * spec.vocab_share))


def _own_rows(tokens: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows of the tokens that this rank holds, zero for the others: the sum over ranks is the embedding."""
    local = tokens - first
    foreign = (local < 0) | (local >= len(table))
    return functional.embedding(local.masked_fill(foreign, 0), table).masked_fill_(foreign.unsqueeze(1), 0)
