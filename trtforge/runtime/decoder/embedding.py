"""From token ids to hidden states: the token embedding and, if any, learned positions, scale and norm."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.layout import EMBEDDING, EMBEDDING_NORM, POSITIONS
from trtforge.runtime.architecture.spec import EmbeddingSplit
from trtforge.runtime.decoder.batch import VirtualRows
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.norms import Norm
from trtforge.runtime.native.bindings import Native, native_for

Lookup = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Embedding:
    """`tokens` and `positions`: lookups in their tables. `scaled`: tokens' rows times the network's factor, `scale`."""

    tokens: Lookup
    scaled: Lookup
    positions: Lookup | None
    norm: Norm | None
    kernels: Native | None
    scale: float = 1.0

    def __call__(self, tokens: Tensor, positions: Tensor, virtual: VirtualRows | None = None) -> Tensor:
        """(tokens, hidden). `virtual`: tokens whose rows come with the step; they are scaled too, and get positions."""
        hidden = self.scaled(tokens)
        if virtual is not None:
            hidden[virtual.places] = virtual.vectors[:, : hidden.shape[1]] * self.scale
        if self.positions is not None:
            learned = self.positions(positions)
            hidden = hidden + learned if self.kernels is None else self.kernels.add(hidden, learned, 1.0)
        return hidden if self.norm is None else self.norm(hidden)


def load_embedding(loader: Loader) -> Embedding:
    """The embedding of a rank."""
    spec, place = loader.spec, loader.place
    network, table, positions = spec.network, loader.tensor(EMBEDDING), None
    if spec.position == "learned":
        split = spec.embedding if network.splits_positions else "replicated"
        positions = _lookup(loader, loader.tensor(POSITIONS), split)
    norm = loader.norm(EMBEDDING_NORM) if network.embedding_norm else None
    # Rounded to the compute type first, as transformers' Gemma does.
    scale = float(torch.tensor(spec.embedding_scale, dtype=place.dtype))
    tokens, scaled = (_lookup(loader, table, spec.embedding, factor) for factor in (1.0, scale))
    return Embedding(tokens, scaled, positions, norm, native_for(place.device, place.dtype), scale)


def _lookup(loader: Loader, table: Tensor, split: EmbeddingSplit, scale: float = 1.0) -> Lookup:
    """The lookup of rows, times `scale`, in a table that may be split over the ranks."""
    ranks, kernels = loader.ranks, native_for(loader.place.device, loader.place.dtype)
    first = loader.spec.rank.tp_rank * len(table) if split == "vocab" else 0

    def own(rows: Tensor) -> Tensor:
        """The rows of this rank's part; zeros for rows of other ranks."""
        if kernels is not None:
            return kernels.lookup(table, rows, scale, first)
        found = _vocab_share(table, rows - first) if split == "vocab" else functional.embedding(rows, table)
        return found if scale == 1.0 else found * scale

    match split:
        case "replicated":
            return own
        case "hidden":
            return lambda rows: ranks.all_gather(own(rows))
        case "vocab":
            return lambda rows: ranks.all_reduce(own(rows))


def _vocab_share(table: Tensor, rows: Tensor) -> Tensor:
    foreign = (rows < 0) | (rows >= len(table))
    found = functional.embedding(rows.masked_fill(foreign, 0), table)
    return found.masked_fill_(foreign.unsqueeze(1), 0)
