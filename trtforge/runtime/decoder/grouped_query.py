"""A layer's grouped-query attention: QKV projection, head norms, rotary embedding, attention, output projection."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.positions import LayerSpec, Temperature
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.alibi import Alibi
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.norms import Norm
from trtforge.runtime.decoder.scores import FusedScores, Scores, SoftmaxScores
from trtforge.runtime.linears.linear import Linear, input_scale


@dataclass(frozen=True)
class GroupedQueryAttention:
    """`head_norms`: per-head norms of queries and of keys. `rotary`: index of the step's rotation for both, if any.

    `l2_norm`: epsilon of a norm without a weight after the rotation; None: no norm. `gated`: the last heads of `qkv`
    are gates of the output.
    """

    qkv: Linear
    dense: Linear
    attention: Attention
    head_norms: tuple[Norm, Norm] | None
    rotary: int | None
    l2_norm: float | None = None
    temperature: Temperature | None = None
    gated: bool = False

    def __call__(self, x: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: LayerCache) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), summed over ranks."""
        queries, keys = self.attention.num_heads, self.attention.num_kv_heads
        heads = self.qkv(x).view(len(x), -1, self.attention.head_size)
        gates = None
        if self.gated:
            heads, gates = heads[:, : queries + 2 * keys], heads[:, queries + 2 * keys :].flatten(1)
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            _norm_heads(query_norm, heads[:, :queries])
            _norm_heads(key_norm, heads[:, queries : queries + keys])
        rotation = rotations[self.rotary] if rotations and self.rotary is not None else None
        if rotation is not None and (self.l2_norm is not None or self.temperature is not None):
            rotation.turn(heads[:, : queries + keys])  # must precede the norm and the temperature
            rotation = None
        if self.l2_norm is not None:
            turned = heads[:, : queries + keys]
            turned.copy_(functional.rms_norm(turned.float(), turned.shape[-1:], eps=self.l2_norm))
        if self.temperature is not None:
            heads[:, :queries] *= _factors(self.temperature, batch.positions).to(heads.dtype).view(-1, 1, 1)
        found = self.attention(heads, batch, cache, rotation, input_scale(self.dense) if gates is None else None)
        return self.dense(found if gates is None else found * gates.sigmoid())

    @property
    def input_scale(self) -> Tensor | None:
        """See `linear.input_scale`."""
        return input_scale(self.qkv)


def _norm_heads(norm: Norm, heads: Tensor) -> None:
    """Normalise heads in place."""
    if not norm.in_place(heads):
        heads.copy_(norm(heads))


def load_grouped_query(loader: Loader, name: str, layer: LayerSpec) -> GroupedQueryAttention:
    """The attention of a layer."""
    spec = loader.spec
    norms = (loader.norm(f"{name}.q_layernorm"), loader.norm(f"{name}.k_layernorm")) if spec.head_norm else None
    return GroupedQueryAttention(
        qkv=loader.linear(f"{name}.qkv"),
        dense=loader.row_parallel(f"{name}.dense"),
        attention=Attention(spec.num_heads, spec.num_kv_heads, spec.head_size, _scores(loader, name), layer.reach),
        head_norms=norms,
        rotary=layer.rotary,
        l2_norm=spec.norm_epsilon if layer.l2_norm else None,
        temperature=layer.temperature,
        gated=spec.network.output_gate,
    )


def _factors(temperature: Temperature, positions: Tensor) -> Tensor:
    """(tokens,) float32: factors of the queries at these positions."""
    return ((positions.float() + 1) / temperature.floor).floor_().log1p_() * temperature.scale + 1


def _scores(loader: Loader, name: str) -> Scores:
    spec = loader.spec
    if spec.network.sinks:
        sinks = loader.tensor(f"{name}.sinks").float().view(spec.num_kv_heads, -1, 1, 1)
        return SoftmaxScores(spec.softmax_scale, spec.softmax_cap, None, sinks)
    if spec.position in ("alibi", "scaled_alibi"):
        return SoftmaxScores(spec.softmax_scale, spec.softmax_cap, _alibi(spec, loader))
    if spec.softmax_cap:
        return SoftmaxScores(spec.softmax_scale, spec.softmax_cap, None)
    return FusedScores(spec.softmax_scale)


def _alibi(spec: DecoderSpec, loader: Loader) -> Alibi:
    """`alibi_with_scale` adds the bias before the scores are scaled, so the bias is scaled too."""
    return Alibi(
        spec.num_heads * spec.tp,
        spec.num_heads * spec.rank.tp_rank,
        spec.num_heads,
        scale=spec.softmax_scale if spec.position == "scaled_alibi" else 1.0,
        coarse=spec.network.coarse_alibi,
        device=loader.place.device,
    )
