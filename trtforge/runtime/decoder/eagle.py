"""The EAGLE network on rank 0: drafts tokens from the model's tokens and hidden states, with a separate KV cache.

At position p it reads the embedding of token p + 1 and the model's hidden state of position p. Its output predicts
token p + 2, and replaces the hidden state of position p + 1 while the model has not computed it. EAGLE (Li et al. 2024,
arXiv 2401.15077) joins embedding and hidden state to one vector before the layer. EAGLE-3 (Li et al. 2025, arXiv
2503.01840) joins three hidden states to one, which the layer reads beside the embedding. Sources: see `formats.eagle`.

With one layer, outputs of earlier positions are not needed, so only their keys and values are computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trtforge.core.errors import ForgeError
from trtforge.formats.eagle import EagleNetwork
from trtforge.formats.shards import RowReader
from trtforge.models.torch_tensors import all_finite, read_tensor
from trtforge.runtime.architecture.positions import Reach
from trtforge.runtime.architecture.rotary import Rotary, RotarySpec, inverse_frequencies
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, in_place_for, zeros
from trtforge.runtime.decoder.logits import most_likely_few
from trtforge.runtime.decoder.mlp import gated_halves
from trtforge.runtime.decoder.norms import RmsNorm
from trtforge.runtime.decoder.padding import padded_rows
from trtforge.runtime.decoder.scores import FusedScores
from trtforge.runtime.linears.linear import Linear, Placement, matrix
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.draft_trees import SEES_ALL, TreeShape, seen_slots
from trtforge.runtime.scheduling.integers import Ints

Embed = Callable[[Tensor], Tensor]
"""Token ids to embeddings."""


def spare_blocks(requests: int, written: int, tokens_per_block: int) -> int:
    """Additional KV blocks for `written` draft tokens of each of `requests` concurrent requests."""
    return requests * -(-written // tokens_per_block)


class Network:
    """The network's weights on a device, and its KV cache once it is allocated."""

    def __init__(
        self,
        source: EagleNetwork,
        place: Placement,
        reach: Reach,
        longest: int,
        model: tuple[int, Embed, Linear],
    ) -> None:
        """`reach`: the tokens that a token attends to; blocks behind it may belong to another sequence. `longest`:
        maximum sequence length. `model`: its vocabulary size, and its embedding and LM head, which the network uses if
        it lacks its own.

        Raises ForgeError for non-finite weights, and for tokens that the model does not have.
        """
        self._source, self._place, self._reach = source, place, reach
        self._cache: LayerCache | None = None
        self._block_size = 0
        tensors = _read(source)
        vocab, embed, head = model
        offsets = tensors.get("d2t")
        self._tokens = None if offsets is None else _proposed_tokens(source, offsets, vocab).to(place.device)
        self._weights = {name: tensor.to(place.device, place.dtype) for name, tensor in tensors.items()}
        table = self._weights.get("embed_tokens.weight")
        self._embed = embed if table is None else lambda tokens: functional.embedding(tokens, table)
        self._head = self._linear("lm_head") if "lm_head.weight" in tensors else head
        self._join = self._linear("fc")
        self._queries = self._linear("layers.0.self_attn.q_proj")
        self._keys_values = self._linear("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")
        self._output = self._linear("layers.0.self_attn.o_proj")
        both = self._linear("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")
        self._gated = gated_halves(place, both, functional.silu, activated=0)
        self._down = self._linear("layers.0.mlp.down_proj")
        self._inner_norm = self._norm("layers.0.post_attention_layernorm")
        reads_layers = source.layers is not None
        self._norms = (
            (self._norm("layers.0.input_layernorm"), self._norm("layers.0.hidden_norm")) if reads_layers else None
        )
        self._final_norm = self._norm("norm") if reads_layers else None
        self._weights = {}
        self._rotary = Rotary(_rotary(source, longest), longest, place.device)
        scores = FusedScores(source.head_size**-0.5)
        self._attention = Attention(source.heads, source.kv_heads, source.head_size, scores, reach)
        kernels = in_place_for(place.device, place.dtype)
        self._in_place = kernels is not None and kernels.attends(source.head_size)

    def block_bytes(self, tokens_per_block: int) -> int:
        """Bytes of the network's keys and values in one block."""
        source = self._source
        return tokens_per_block * 2 * source.kv_heads * source.head_size * self._place.dtype.itemsize

    def allocate_cache(self, blocks: int, tokens_per_block: int) -> LayerCache:
        """Allocate the network's KV cache; required before anything is computed."""
        shape = (blocks, tokens_per_block, 2 * self._source.kv_heads, self._source.head_size)
        storage = zeros(shape, self._place.dtype, self._place.device)
        self._cache = LayerCache(storage, None, self._place.dtype, Scratch())
        self._block_size = tokens_per_block
        return self._cache

    @torch.inference_mode()
    def joined(self, states: Tensor) -> Tensor:
        """The network's input from hidden states of the model (tokens, width)."""
        return states if self._source.layers is None else self._join(states)

    @torch.inference_mode()
    def write(self, tokens: Ints, states: Tensor, positions: Ints, slots: Ints) -> None:
        """Cache the keys and values of these positions. `tokens`: the token after each position."""
        device = self._place.device
        read, _ = self._inputs(torch.from_numpy(tokens).to(device), states)
        heads = self._keys_values(read).view(len(tokens), -1, self._source.head_size)
        rotation = self._rotary.at(torch.from_numpy(positions).to(device), self._place.dtype)
        rotation.turn(heads[:, : self._source.kv_heads])
        assert self._cache is not None, "see allocate_cache"
        self._cache.write(torch.from_numpy(slots).to(device), heads)

    @torch.inference_mode()
    def tree(self, tokens: Ints, states: Tensor, positions: Ints, tables: Ints, shape: TreeShape) -> Tensor:
        """Draft tokens (sequences, nodes). `positions`: the first position of each sequence that is not cached.

        `tokens`, `states`: next token and hidden state of that position; `tables`: blocks, with slots for that position
        and for each node of the tree that has children.
        """
        followed = shape.followed
        slots = {-1: 0} | {node: 1 + index for index, node in enumerate(followed)}
        seen = [SEES_ALL, *seen_slots([slots[shape.parents[node]] - 1 for node in followed])]
        proposed: dict[int, Tensor] = {-1: torch.from_numpy(tokens).to(self._place.device)}
        hidden, level = {-1: states}, [-1]
        while level:
            own = [slots[node] for node in level]
            batch = self._batch(positions, tables, own, [seen[slot] for slot in own])
            inputs = _by_sequence([proposed[node] for node in level])
            before = _by_sequence([hidden[-1 if node < 0 else shape.parents[node]] for node in level])
            outputs = self._step(replace(batch, tokens=inputs), before)
            places = {node: place for place, node in enumerate(level)}
            below = [(node, places[parent]) for node, parent in enumerate(shape.parents) if parent in places]
            most = 1 + max(shape.ranks[node] for node, _ in below)
            candidates = self._proposed(outputs, most).view(len(tokens), len(level), most)
            hidden |= dict(zip(level, outputs.view(len(tokens), len(level), -1).unbind(1), strict=True))
            proposed |= {node: candidates[:, place, shape.ranks[node]] for node, place in below}
            level = [node for node, _ in below if node in slots]
        return torch.stack([proposed[node] for node in range(len(shape.parents))], dim=1)

    def _batch(self, positions: Ints, tables: Ints, slots: list[int], seen: list[int]) -> Batch:
        """A row at each of these slots, counted from a sequence's position, for one sequence after another."""
        starts, count = (positions[:, None] + np.array(slots)).reshape(-1), len(slots)
        ones, bits = np.ones_like(starts), np.array(seen * len(positions), dtype=np.int64)
        step = Step(starts, ones, ones, np.repeat(tables, count, axis=0), starts)
        return Batch.of(
            step if (bits == SEES_ALL).all() else replace(step, seen=bits),
            self._block_size,
            self._place.device,
            self._place.dtype,
            reaches=(self._reach,),
            in_place=self._in_place,
        )

    def _inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input, and the residual that its output is added to."""
        embedded = self._embed(tokens)
        if self._norms is None:
            joined = self._join(torch.cat((embedded, states), dim=1))
            return joined, joined
        token_norm, state_norm = self._norms
        normed = state_norm(states)
        residual = normed if self._source.norm_before_residual else states
        return torch.cat((token_norm(embedded), normed), dim=1), residual

    def _step(self, batch: Batch, states: Tensor) -> Tensor:
        """(rows, hidden): the network's output for single-token rows."""
        assert self._cache is not None, "see allocate_cache"
        read, residual = self._inputs(batch.tokens, states)
        heads = torch.cat((self._queries(read), self._keys_values(read)), dim=1)
        heads = heads.view(len(read), -1, self._source.head_size)
        turned = self._source.heads + self._source.kv_heads
        self._rotary.at(batch.positions, self._place.dtype).turn(heads[:, :turned])
        hidden = residual + self._output(self._attention(heads, batch, self._cache))
        return hidden + self._down(self._gated(self._inner_norm(hidden)))

    def _proposed(self, hidden: Tensor, count: int) -> Tensor:
        """The `count` most likely tokens of each row."""
        normed = hidden if self._final_norm is None else self._final_norm(hidden)
        chosen = most_likely_few(self._head(normed).float(), count)
        return chosen if self._tokens is None else self._tokens[chosen]

    def _linear(self, *names: str) -> Linear:
        """Linear layers with the same input, merged into one."""
        weights = [self._weights[f"{name}.weight"] for name in names]
        biases = [self._weights.get(f"{name}.bias") for name in names]
        bias = None
        if any(each is not None for each in biases):
            pairs = zip(biases, weights, strict=True)
            bias = torch.cat([weight.new_zeros(len(weight)) if each is None else each for each, weight in pairs])
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return _padding(matrix(weight, bias), weight)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._weights[f"{name}.weight"], self._source.epsilon)


def _by_sequence(nodes: list[Tensor]) -> Tensor:
    """Merge the tensors (sequences, ...) of several nodes into one (sequences x nodes, ...), sequence by sequence."""
    return nodes[0] if len(nodes) == 1 else torch.stack(nodes, dim=1).flatten(0, 1)


def require_network(source: EagleNetwork, vocab: int, longest: int) -> None:
    """Raises ForgeError for an EAGLE network that `Network` refuses."""
    tensors = _read(source)
    _rotary(source, longest)
    if "d2t" in tensors:
        _proposed_tokens(source, tensors["d2t"], vocab)


def _padding(linear: Linear, weight: Tensor) -> Linear:
    """The layer, padded to few different numbers of rows if oneDNN compiles a kernel for each number."""
    kernels = native_for(weight.device, weight.dtype)
    if weight.is_cuda or weight.dtype is torch.float32 or (kernels is not None and kernels.takes(weight)):
        return linear

    def padded(x: Tensor) -> Tensor:
        more = padded_rows(len(x)) - len(x)
        return linear(functional.pad(x, (0, 0, 0, more)))[: len(x)].contiguous() if more else linear(x)

    return padded


def _read(source: EagleNetwork) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = {}
    with RowReader() as reader:
        for name, stored in source.tensors.items():
            tensor = found[name] = read_tensor(reader, stored)
            if not all_finite(tensor.float()):
                raise ForgeError(f"{stored.file}: {name} has numbers that are not finite", hint="Train it again.")
    return found


def _proposed_tokens(source: EagleNetwork, offsets: Tensor, vocab: int) -> Tensor:
    """The model's token id for each of the network's; d2t contains the differences."""
    tokens = torch.arange(len(offsets)) + offsets.long()
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        wrong = int(((tokens < 0) | (tokens >= vocab)).nonzero()[0])
        raise ForgeError(
            f"{source.tensors['d2t'].file}: d2t maps token {wrong} to {int(tokens[wrong])}, the model has {vocab}",
            hint="Give the network that was trained for this model.",
        )
    return tokens


def _rotary(source: EagleNetwork, longest: int) -> RotarySpec:
    """The network's rotary embedding. Raises ForgeError for an unknown or incomplete scaling."""
    spec = RotarySpec(source.head_size, source.rotary_base, source.max_positions, source.rotary_scaling)
    try:
        inverse_frequencies(spec, longest)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ForgeError(
            f"{source.files[0]}: rope_scaling is not valid: {error!r}", hint="Use the config.json that came with it."
        ) from None
    return spec
