"""One decoder layer: attention and MLP with their norms and residual connections."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtforge.runtime.architecture.layout import LINEAR_ATTENTION, layer_name, router_name
from trtforge.runtime.architecture.network import ResidualKind
from trtforge.runtime.architecture.rotary import Rotation
from trtforge.runtime.cuda.fused import StepKernels, step_kernels_for
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.grouped_query import load_grouped_query
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.latent import load_latent
from trtforge.runtime.decoder.linear_attention import load_linear
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.mlp import load_mlp
from trtforge.runtime.decoder.moe import load_moe
from trtforge.runtime.decoder.norms import Norm, RmsNorm
from trtforge.runtime.linears.linear import Linear, input_scale


class AttentionPart(Protocol):
    """Attention, from hidden states to its output projection, summed over ranks."""

    def __call__(self, x: Tensor, batch: Batch, rotations: tuple[Rotation, ...], cache: LayerCache) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    """`kind`: see `Residual`. `scale`: multiplier of everything that is added to the residual."""

    kind: ResidualKind
    input_norm: Norm | None
    attention: AttentionPart
    mlp_norm: Norm | None
    mlp: Linear
    after_attention: Norm | None
    after_mlp: Norm | None
    scale: float
    kernels: StepKernels | None

    def __call__(
        self,
        hidden: Tensor,
        change: Tensor | None,
        batch: Batch,
        rotations: tuple[Rotation, ...],
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to `summed(hidden, change)`, (tokens, hidden); returns the two parts of the resulting sum.

        The layer's last addition is fused with the norm at the beginning of the next layer.
        """
        if self.kind == "sequential":
            hidden, normed = self._normed_sum(self.input_norm, hidden, change, self.attention)
            change = self._after(self.attention(normed, batch, rotations, cache), self.after_attention)
            hidden, normed = self._normed_sum(self.mlp_norm, hidden, change, self.mlp)
            return hidden, self._after(self.mlp(normed), self.after_mlp)
        hidden = self.summed(hidden, change)
        match self.kind:
            case "output_norm":
                change = self._after(self.attention(hidden, batch, rotations, cache), self.after_attention)
                hidden = self._add(hidden, change)
                return hidden, self._after(self.mlp(hidden), self.after_mlp)
            case "parallel":
                normed = self._input(hidden)
                mlp_input = normed if self.mlp_norm is None else self.mlp_norm(hidden)
                return self._add(hidden, self.attention(normed, batch, rotations, cache)), self.mlp(mlp_input)
            case "post_norm":
                hidden = self._input(self._add(hidden, self.attention(hidden, batch, rotations, cache)))
                return self._mlp_input(self._add(hidden, self.mlp(hidden))), None

    def summed(self, hidden: Tensor, change: Tensor | None) -> Tensor:
        """The sum of the two parts, the second one scaled."""
        return hidden if change is None else self._add(hidden, change)

    def _normed_sum(
        self, norm: Norm | None, hidden: Tensor, change: Tensor | None, reader: object
    ) -> tuple[Tensor, Tensor]:
        """The sum of two parts, and its norm, in E4M3 codes if `reader` takes them and a kernel computes them."""
        assert norm is not None
        if isinstance(norm, RmsNorm):
            found = norm.of_sum(hidden, change, self.scale, input_scale(reader))
            if found is not None:
                return found
        hidden = self.summed(hidden, change)
        return hidden, norm(hidden)

    def _input(self, hidden: Tensor) -> Tensor:
        assert self.input_norm is not None
        return self.input_norm(hidden)

    def _mlp_input(self, hidden: Tensor) -> Tensor:
        assert self.mlp_norm is not None
        return self.mlp_norm(hidden)

    @staticmethod
    def _after(change: Tensor, norm: Norm | None) -> Tensor:
        """The output of attention or MLP as added to the residual: normed if there is a norm."""
        return change if norm is None else norm(change)

    def _add(self, hidden: Tensor, change: Tensor) -> Tensor:
        if self.kernels is not None and hidden.is_contiguous() and change.is_contiguous():
            return self.kernels.add(hidden, change, self.scale)
        return hidden + change if self.scale == 1.0 else hidden + change * self.scale


def load_layer(loader: Loader, index: int) -> Layer:
    """Layer `index` of this pipeline stage."""
    spec, name = loader.spec, layer_name(index)
    residual = spec.residual
    linear = spec.layers[index].linear
    attention = load_linear if linear else load_latent if spec.latent else load_grouped_query
    mlp = load_moe if router_name(index) in loader.tensors else load_mlp

    def norm(part: str | None) -> Norm | None:
        return None if part is None else loader.norm(f"{name}.{part}")

    return Layer(
        kind=residual.kind,
        input_norm=norm(residual.input_norm),
        attention=attention(loader, f"{name}.{LINEAR_ATTENTION if linear else 'attention'}", spec.layers[index]),
        mlp_norm=norm(residual.mlp_norm),
        mlp=mlp(loader, f"{name}.mlp"),
        after_attention=norm(residual.after_attention),
        after_mlp=norm(residual.after_mlp),
        scale=spec.residual_scale,
        kernels=step_kernels_for(loader.place.device, loader.place.dtype),
    )


def kv_scale(loader: Loader, index: int) -> float | None:
    """The scale of a layer's quantised KV cache."""
    if loader.spec.kv_format == "none" or loader.spec.layers[index].linear:
        return None
    return float(loader.tensor(f"{layer_name(index)}.attention.kv_cache_scaling_factor"))
