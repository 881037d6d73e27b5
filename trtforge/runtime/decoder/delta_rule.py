"""The gated delta rule: a matrix for each head that maps keys to values, decays, and is updated by each token.

State S, key k, value v, decay exp(g) and learning rate b give the next state S' = exp(g) S + k (b (v - exp(g) S^T k))^T
and the output S'^T q. Source: "Gated Delta Networks" (arXiv:2412.06464), section 3 also for chunks; numerics:
torch_recurrent_gated_delta_rule and torch_chunk_gated_delta_rule of transformers. All tensors are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.delta_rule import Parts, delta_sequence, delta_tokens

_CHUNK = 64
_ADDED = 1e-6  # epsilon, added to the squared norms of queries and keys


@dataclass(frozen=True)
class Tokens:
    """Tokens of some heads: queries and keys (..., key size), values (..., value size), rates and log decays (...)."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    rates: Tensor
    decays: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, values: Tensor, rates: Tensor, decays: Tensor) -> "Tokens":
        """From projected queries and keys (tokens, key heads, key size), and values (tokens, value heads, value size).

        Consecutive value heads share a key head. Queries and keys are normalised; queries are also scaled.
        """
        shared = values.shape[1] // keys.shape[1]
        queries, keys = (_normalised(each.float()).repeat_interleave(shared, dim=1) for each in (queries, keys))
        return cls(queries * keys.shape[-1] ** -0.5, keys, values.float(), rates.float(), decays)

    @property
    def parts(self) -> Parts:
        """The tensors in the kernels' order."""
        return self.queries, self.keys, self.values, self.rates, self.decays

    def __getitem__(self, tokens: slice | Tensor) -> "Tokens":
        """Some of the tokens."""
        return Tokens(*(part[tokens] for part in self.parts))

    def by_head(self) -> "Tokens":
        """(tokens, heads, ...) as (heads, tokens, ...)."""
        return Tokens(*(part.transpose(0, 1) for part in self.parts))


def one_token(tokens: Tokens, states: Sequence[Tensor], spent: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
    """Compute one token per row: outputs (rows, heads, value size), and states after it (heads, key size, value size).

    `spent`: whether a state is not needed afterwards, so that its memory can be reused.
    """
    kernels = native_for(tokens.keys.device, tokens.keys.dtype)
    if kernels is not None:
        states = [state.contiguous() for state in states]
        after = [state if taken else torch.empty_like(state) for state, taken in zip(states, spent, strict=True)]
        return delta_tokens(kernels, tokens.parts, states, after), after
    memory = torch.stack(list(states)) * tokens.decays.exp()[..., None, None]
    known = torch.einsum("rhkv,rhk->rhv", memory, tokens.keys)
    learned = (tokens.values - known) * tokens.rates[..., None]
    memory = memory + tokens.keys[..., None] * learned[..., None, :]
    return torch.einsum("rhkv,rhk->rhv", memory, tokens.queries), [state.clone() for state in memory]


def sequence(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one sequence's tokens: outputs (tokens, heads, value size), and the state after them (heads, key size,
    value size)."""
    kernels = native_for(tokens.keys.device, tokens.keys.dtype)
    if kernels is not None:
        return delta_sequence(kernels, tokens.parts, state)
    found = []
    for first in range(0, len(tokens.keys), _CHUNK):
        outputs, state = _chunk(tokens[first : first + _CHUNK].by_head(), state)
        found.append(outputs.transpose(0, 1))
    return torch.cat(found), state


def _chunk(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a chunk of tokens (heads, tokens, ...) at once: their updates of the state solve a triangular system."""
    keys, queries = tokens.keys, tokens.queries
    decayed = tokens.decays.cumsum(dim=1)
    between = (decayed[:, :, None] - decayed[:, None, :]).tril().exp().tril()
    weighted = keys * tokens.rates[..., None]
    system = ((weighted @ keys.mT) * between).tril(-1)
    known = (weighted * decayed.exp()[..., None]) @ state
    wanted = tokens.values * tokens.rates[..., None] - known
    learned = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    outputs = (queries * decayed.exp()[..., None]) @ state + ((queries @ keys.mT) * between) @ learned
    last = decayed[:, -1:]
    return outputs, state * last.exp()[..., None] + (keys * (last - decayed).exp()[..., None]).mT @ learned


def _normalised(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _ADDED)
