"""From token ids to hidden states: the token embedding and, if any, learned positions, scale and norm."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.layout import EMBEDDING, EMBEDDING_NORM, POSITIONS
from trtforge.runtime.architecture.spec import DecoderSpec, EmbeddingSplit
from trtforge.runtime.decoder.collective import Collective
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.norms import Norm

Lookup = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Embedding:
    """`tokens` and `positions`: lookups in their tables."""

    tokens: Lookup
    positions: Lookup | None
    scale: float
    norm: Norm | None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(tokens, hidden)."""
        hidden = self.tokens(tokens)
        if self.scale != 1.0:
            hidden = hidden * self.scale
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        return hidden if self.norm is None else self.norm(hidden)


def load_embedding(loader: Loader) -> Embedding:
    """The embedding of a rank."""
    spec = loader.spec
    network = spec.network
    embed_tokens = _lookup(loader, EMBEDDING, spec.embedding)
    embed_positions = None
    if spec.position == "learned":
        embed_positions = _lookup(loader, POSITIONS, spec.embedding if network.splits_positions else "replicated")
    norm = loader.norm(EMBEDDING_NORM) if network.embedding_norm else None
    # Rounded to the compute type first, as transformers' Gemma does.
    scale = float(torch.tensor(spec.embedding_scale, dtype=loader.place.dtype))
    return Embedding(embed_tokens, embed_positions, scale, norm)


def _lookup(loader: Loader, name: str, split: EmbeddingSplit) -> Lookup:
    """The lookup of rows in a table that may be split over the ranks."""
    spec, ranks, table = loader.spec, loader.ranks, loader.tensor(name)
    match split:
        case "replicated":
            return lambda rows: functional.embedding(rows, table)
        case "hidden":
            return lambda rows: ranks.all_gather(functional.embedding(rows, table))
        case "vocab":
            return _vocab_parallel(spec, ranks, table)


def _vocab_parallel(spec: DecoderSpec, ranks: Collective, table: Tensor) -> Lookup:
    first = spec.rank.tp_rank * len(table)

    def lookup(rows: Tensor) -> Tensor:
        """Rows that this rank holds, zero for the others: the sum over ranks is the embedding."""
        local = rows - first
        foreign = (local < 0) | (local >= len(table))
        own = functional.embedding(local.masked_fill(foreign, 0), table)
        return ranks.all_reduce(own.masked_fill_(foreign.unsqueeze(1), 0))

    return lookup
