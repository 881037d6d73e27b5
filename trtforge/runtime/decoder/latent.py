"""Multi-head latent attention (DeepSeek-V2): all heads share one cached vector, a compressed latent and a rotated key.

Weight absorption as in tensorrt_llm/models/deepseek_v2: queries are projected to the latent space, attend to the
latents directly, and the result is expanded to each head's values. This is exact: the same products in another order.
Contexts attend to keys and values expanded from the latents if that takes fewer products.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.positions import LayerSpec
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.architecture.spec_parts import LatentSpec
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch, ContextRow
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.norms import RmsNorm
from trtforge.runtime.decoder.scores import FusedScores
from trtforge.runtime.linears.linear import Linear, matrix
from trtforge.runtime.native.bindings import Native, native_for
from trtforge.runtime.native.heads import copy_heads, project_heads

_EPSILON = 1e-6  # of the two inner norms, independent of norm_epsilon: the default in transformers and TensorRT-LLM


@dataclass(frozen=True)
class LatentAttention:
    """`query` is q_b_proj; `expand` (heads x (nope + value), latent) is kv_b_proj, the keys' rows first.

    `absorb` (heads, nope, latent) and `values` (heads, latent, value) are its parts for keys and values, by head.
    """

    sizes: LatentSpec
    fused_a: Linear
    query_norm: RmsNorm | None
    latent_norm: RmsNorm
    query: Linear
    expand: Tensor
    absorb: Tensor
    values: Tensor
    dense: Linear
    attention: Attention
    rotary: int
    kernels: Native | None

    def __call__(self, x: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: LayerCache) -> Tensor:
        """(tokens, hidden) to (tokens, hidden), summed over ranks."""
        sizes, count = self.sizes, self.attention.num_heads
        compressed, latent, key = self.fused_a(x).split([sizes.q_rank, sizes.kv_rank, sizes.rope_size], dim=1)
        queries = self.query(self._source(x, compressed)).view(len(x), count, -1)
        cached = x.new_empty(len(x), 1, sizes.cached_size)
        self.latent_norm.into(latent, cached[:, 0, : sizes.kv_rank])
        self._copy(key.unsqueeze(1), cached[..., sizes.kv_rank :])
        rotations[self.rotary].turn(cached[..., sizes.kv_rank :])
        rotations[self.rotary].turn(queries[..., sizes.nope_size :])
        if not self._expands(batch):
            return self.dense(self._absorbed(queries, cached, batch, cache))
        found = x.new_zeros(len(x), count * sizes.value_size)
        first = batch.context[0].first
        if first:
            rows = replace(batch, slots=batch.slots[:first], context=(), chunks=None)
            found[:first] = self._absorbed(queries[:first], cached[:first], rows, cache)
        tokens = len(batch.slots)
        cache.write(batch.slots[first:], cached[first:tokens])
        for row in batch.context:
            found[row.first : row.end] = self._expanded(queries[row.first : row.end], cached, row, cache)
        return self.dense(found)

    def _source(self, x: Tensor, compressed: Tensor) -> Tensor:
        if self.query_norm is None:
            return x
        source = compressed.new_empty(compressed.shape)
        self.query_norm.into(compressed, source)
        return source

    def _absorbed(self, queries: Tensor, cached: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Attention of queries (tokens, heads, nope + rope) to latents: (tokens, heads x value)."""
        sizes, (tokens, count, _) = self.sizes, queries.shape
        heads = queries.new_empty(tokens, count, sizes.cached_size)
        self._project(queries[..., : sizes.nope_size], self.absorb, heads[..., : sizes.kv_rank])
        self._copy(queries[..., sizes.nope_size :], heads[..., sizes.kv_rank :])
        found = self.attention.of(heads, cached, batch, cache).view(tokens, count, -1)
        values = queries.new_empty(tokens, count, sizes.value_size)
        self._project(found[..., : sizes.kv_rank], self.values, values)
        return values.view(tokens, -1)

    def _project(self, x: Tensor, matrices: Tensor, y: Tensor) -> None:
        """y (tokens, heads, outputs) = x (tokens, heads, inputs) times (heads, inputs, outputs)."""
        if self.kernels is not None:
            project_heads(self.kernels, x, matrices, y)
        else:
            y.copy_(torch.einsum("thi,hio->tho", x, matrices))

    def _copy(self, x: Tensor, y: Tensor) -> None:
        """y = x, both (tokens, heads, size)."""
        if self.kernels is not None:
            copy_heads(self.kernels, x, y)
        else:
            y.copy_(x)

    def _expands(self, batch: Batch) -> bool:
        """Whether the contexts of a step take fewer products per head with expanded keys and values."""
        sizes = self.sizes
        expanding = (sizes.nope_size + sizes.value_size) * sizes.kv_rank  # a token
        saved = 0
        for row in batch.context:
            count, seen = row.end - row.first, row.start + row.end - row.first
            saved += count * expanding + count * seen * 2 * sizes.cached_size
            saved -= seen * expanding + count * seen * 2 * self._by_heads.head_size
        return saved > 0

    @cached_property
    def _by_heads(self) -> Attention:
        """Attention to expanded keys and values, which are zero-padded to one size."""
        count, size = self.attention.num_heads, max(self.sizes.head_size, self.sizes.value_size)
        return Attention(count, count, size, self.attention.scores, self.attention.reach)

    def _expanded(self, queries: Tensor, cached: Tensor, row: ContextRow, cache: LayerCache) -> Tensor:
        """Like `_absorbed`, for one context, with expanded keys and values."""
        sizes, (tokens, count, _) = self.sizes, queries.shape
        seen = row.seen(cached, cache)[:, 0]
        latents, rotated = seen[:, : sizes.kv_rank], seen[:, sizes.kv_rank :]
        keys, values = functional.linear(latents, self.expand).split(
            [count * sizes.nope_size, count * sizes.value_size], dim=1
        )
        size = self._by_heads.head_size
        vectors = seen.new_zeros(len(seen), 2 * count, size)
        vectors[:, :count, : sizes.nope_size] = keys.view(len(seen), count, -1)
        vectors[:, :count, sizes.nope_size : sizes.head_size] = rotated.unsqueeze(1)
        vectors[:, count:, : sizes.value_size] = values.view(len(seen), count, -1)
        filled = functional.pad(queries, (0, size - sizes.head_size))
        found = self._by_heads.sequence(filled, vectors, row.start)
        return found.view(tokens, count, -1)[..., : sizes.value_size].flatten(1)


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
        expand=expand,
        absorb=keys.unflatten(0, (spec.num_heads, -1)),
        values=values.unflatten(0, (spec.num_heads, -1)).transpose(1, 2).contiguous(),
        dense=loader.row_parallel(f"{name}.dense"),
        attention=Attention(
            spec.num_heads, 1, sizes.cached_size, FusedScores(spec.softmax_scale), layer.reach, latent=True
        ),
        rotary=layer.rotary or 0,
        kernels=native_for(loader.place.device, loader.place.dtype),
    )
