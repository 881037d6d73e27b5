"""Multi-head latent attention (DeepSeek-V2): all heads share one cached vector, a compressed latent and a rotated key.

Weight absorption as in tensorrt_llm/models/deepseek_v2: queries are projected to the latent space, attend to the
latents directly, and the result is expanded to each head's values. Exact: the same products in another order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.runtime.architecture.positions import LayerSpec
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.architecture.spec_parts import LatentSpec
from trtforge.runtime.decoder.attention import Attention, Batch
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.norms import Norm, RmsNorm
from trtforge.runtime.decoder.scores import FusedScores
from trtforge.runtime.linears.linear import Linear, matrix

_EPSILON = 1e-6  # of the two inner norms, independent of norm_epsilon: the default in transformers and TensorRT-LLM


@dataclass(frozen=True)
class LatentAttention:
    """`keys` (heads, nope, latent) and `values` (heads, value, latent) expand the latent; `query` is q_b_proj."""

    sizes: LatentSpec
    fused_a: Linear
    query_norm: Norm | None
    latent_norm: Norm
    query: Linear
    keys: Tensor
    values: Tensor
    dense: Linear
    attention: Attention
    rotary: int

    def __call__(self, x: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: LayerCache) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), summed over ranks."""
        sizes, count = self.sizes, self.attention.num_heads
        compressed, latent, key = self.fused_a(x).split([sizes.q_rank, sizes.kv_rank, sizes.rope_size], dim=1)
        source = x if self.query_norm is None else self.query_norm(compressed)
        queries = self.query(source).view(len(x), count, -1)
        heads = x.new_empty(len(x), count + 1, sizes.cached_size)
        heads[:, :count, : sizes.kv_rank] = torch.einsum("thd,hdk->thk", queries[..., : sizes.nope_size], self.keys)
        heads[:, :count, sizes.kv_rank :] = queries[..., sizes.nope_size :]
        heads[:, count, : sizes.kv_rank] = self.latent_norm(latent)
        heads[:, count, sizes.kv_rank :] = key
        rotations[self.rotary].turn(heads[..., sizes.kv_rank :])
        found = self.attention(heads, batch, cache).view(len(x), count, -1)[..., : sizes.kv_rank]
        return self.dense(torch.einsum("thk,hvk->thv", found, self.values).flatten(1))


def load_latent(loader: Loader, name: str, layer: LayerSpec) -> LatentAttention:
    """The attention of a layer."""
    spec, sizes = loader.spec, loader.spec.latent
    assert sizes is not None, "only networks with latent attention load it"
    expand = loader.tensor(f"{name}.kv_b_proj")
    keys, values = expand.split([spec.num_heads * sizes.nope_size, spec.num_heads * sizes.value_size])
    return LatentAttention(
        sizes=sizes,
        fused_a=loader.linear(f"{name}.fused_a"),
        query_norm=RmsNorm(loader.tensor(f"{name}.q_a_layernorm.weight"), _EPSILON) if sizes.q_rank else None,
        latent_norm=RmsNorm(loader.tensor(f"{name}.kv_a_layernorm.weight"), _EPSILON),
        query=matrix(loader.tensor(f"{name}.q_b_proj")),
        keys=keys.unflatten(0, (spec.num_heads, -1)),
        values=values.unflatten(0, (spec.num_heads, -1)),
        dense=loader.row_parallel(f"{name}.dense"),
        attention=Attention(
            spec.num_heads, 1, sizes.cached_size, FusedScores(spec.softmax_scale), layer.reach, latent=True
        ),
        rotary=layer.rotary or 0,
    )
