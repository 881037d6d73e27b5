"""Computes a checkpoint or engine layer by layer over many sequences, with one layer's weights in memory.

The ranks are threads of this process and use the same collectives as an engine's ranks. This module keeps the hidden
states between layers, so pipeline stages do not communicate.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.share import Share, not_shown
from trtforge.runtime.architecture.rotary import Rotary
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.collective import Alone, Collective
from trtforge.runtime.decoder.embedding import load_embedding
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, storage_dtype
from trtforge.runtime.decoder.layer import kv_scale, load_layer
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.logits import Head, finished_logits
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.linears.packing import Packing, sparse_layers
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.ranks.distributed import Distributed, join_store, serve_store
from trtforge.runtime.ranks.rank_model import placement_of
from trtforge.runtime.ranks.rank_threads import RankThreads, Task
from trtforge.runtime.ranks.shared_sums import SharedSums
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.scheduling.batch import Step

TOKENS_AT_ONCE = 2048
Compute = Callable[[Batch, Tensor], Tensor]


class Layerwise:
    """The hidden states of token sequences, layer by layer. A context manager: leaving it ends the rank threads.

    `advance` computes the next layer. After the last layer, call `load_logits`, then `logits` for each sequence.
    """

    def __init__(self, source: Source, sequences: Sequence[Sequence[int]]) -> None:
        _require_computable(source, sequences)
        self._steps = [_chunks(tokens, source.tokens_per_block) for tokens in sequences]
        blocks = max(-(-len(tokens) // source.tokens_per_block) for tokens in sequences)
        parallel = source.config.parallel
        indices = range(parallel.world_size)
        placements = [placement_of(source, index) for index in indices]  # reports a missing GPU before ranks wait
        self._threads: RankThreads[Any] = RankThreads(len(placements), max(1, torch.get_num_threads() // parallel.tp))
        connect = _connector(source, placements)
        self._ranks: list[_Rank] = []
        try:
            collectives = self._threads.run([Task(partial(connect, index)) for index in indices])
            for index in indices:
                self._ranks.append(_Rank(source, index, placements[index], collectives[index], blocks))
            self._per_stage = self._ranks[0].spec.num_layers
            self._hidden: list[list[Tensor]] = []
            self._next = 0
            first = self._stage(0)
            self._each(first, _Rank.load_embedding)
            for steps in self._steps:
                empty = torch.empty(0)
                self._hidden.append([self._run(first, step, empty) for step in steps])
        except BaseException:
            self.close()
            raise

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self._per_stage * (self._ranks[-1].spec.rank.pp_rank + 1)

    @property
    def hidden_size(self) -> int:
        """Size of a token's hidden state."""
        return self._ranks[0].spec.hidden_size

    def advance(self, finished: Share = not_shown) -> None:
        """Compute the next layer for all sequences; after each, `finished` is called with its share of the work."""
        stage, index = divmod(self._next, self._per_stage)
        ranks = self._stage(stage)
        self._each(ranks, partial(_Rank.load_layer, index=index))
        for steps, parts in zip(self._steps, self._hidden, strict=True):
            for chunk, step in enumerate(steps):
                parts[chunk] = self._run(ranks, step, parts[chunk])
            finished(1 / len(self._steps))
        self._next += 1

    def states(self, sequence: int) -> Tensor:
        """float32 (tokens, hidden) output of the last computed layer, on the CPU."""
        return torch.cat([part[: len(step.tokens)] for part, step in self._of(sequence)]).float().cpu()

    def load_logits(self) -> None:
        """Load the final norm and LM head. Raises ForgeError if a rank file has unexpected tensors."""
        assert self._next == self.num_layers, "load_logits before the last layer"
        self._each(self._stage(-1), _Rank.load_logits)
        for rank in self._ranks:
            rank.finish()

    def logits(self, sequence: int) -> Tensor:
        """float32 (tokens, vocabulary) on the CPU: row i predicts the token after token i."""
        ranks, parts = self._stage(-1), []
        for part, step in self._of(sequence):
            columns = [found.cpu() for found in self._on(ranks, step, part)]
            parts.append(finished_logits(torch.cat(columns, dim=1)[: len(step.tokens)], ranks[0].spec))
        return torch.cat(parts)

    def close(self) -> None:
        """End the threads and close the files."""
        self._threads.close()
        for rank in self._ranks:
            rank.close()

    def __enter__(self) -> "Layerwise":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, sequence: int) -> list[tuple[Tensor, Step]]:
        return list(zip(self._hidden[sequence], self._steps[sequence], strict=True))

    def _stage(self, stage: int) -> "list[_Rank]":
        wanted = self._ranks[-1].spec.rank.pp_rank if stage < 0 else stage
        return [rank for rank in self._ranks if rank.spec.rank.pp_rank == wanted]

    def _run(self, ranks: "list[_Rank]", step: Step, hidden: Tensor) -> Tensor:
        return self._on(ranks, step, hidden)[0]

    def _each(self, ranks: "list[_Rank]", load: "Callable[[_Rank], None]") -> None:
        """Unload all ranks, then load `ranks` one after another, which bounds the peak memory."""
        for rank in self._ranks:
            rank.unload()
        for rank in ranks:
            with torch.inference_mode():
                load(rank)

    def _on(self, ranks: "list[_Rank]", step: Step, hidden: Tensor) -> list[Tensor]:
        """Compute on the ranks of a stage concurrently, as their collectives require."""
        return self._threads.run([Task(partial(rank.compute, step, hidden), rank.leave) for rank in ranks])


class _Rank:
    """One rank, with one part of its weights at a time."""

    def __init__(self, source: Source, index: int, place: Placement, ranks: Collective, blocks: int) -> None:
        self.spec, self._place, self._ranks = source.spec(index), place, ranks
        self._kernels, self._tokens_per_block = source.forge.kernels, source.tokens_per_block
        self._stored = Weights.stream(source.directory, index)
        self._sparse = sparse_layers(self.spec, self._stored)
        self._packing = (
            None if source.packed else Packing(source.config, index, self._stored, self._kernels, self._place.dtype)
        )
        longest = source.limits.max_seq_len
        self._rotaries = [Rotary(rotary, longest, self._place.device) for rotary in self.spec.rotaries]
        dtype = storage_dtype(self.spec.kv_format, self._place.dtype)
        self._blocks = torch.zeros(
            (blocks, source.tokens_per_block, *self.spec.cached), dtype=dtype, device=self._place.device
        )
        self._scratch = Scratch()
        self._compute: Compute | None = None

    def unload(self) -> None:
        """Release the weights."""
        self._compute = None

    def load_embedding(self) -> None:
        """Make `compute` return embeddings; it then ignores the hidden states."""
        embed = load_embedding(self._loader(None if self._packing is None else self._packing.embedding()))
        self._compute = lambda batch, _: embed(batch.tokens, batch.positions)

    def load_layer(self, index: int) -> None:
        """Make `compute` run layer `index` of this stage."""
        loader = self._loader(None if self._packing is None else self._packing.layer(index))
        layer, scale = load_layer(loader, index), kv_scale(loader, index)
        if self._packing is not None:
            loader.weights.finish()
        cache = LayerCache(self._blocks, scale, self._place.dtype, self._scratch)

        def compute(batch: Batch, hidden: Tensor) -> Tensor:
            rotations = tuple(rotary.at(batch.positions, self._place.dtype, batch.length) for rotary in self._rotaries)
            return layer.summed(*layer(hidden, None, batch, rotations, cache))

        self._compute = compute

    def load_logits(self) -> None:
        """Make `compute` return this rank's columns of the logits."""
        head = Head(self._loader(None if self._packing is None else self._packing.head()))
        self._compute = lambda _, hidden: head(hidden)

    def compute(self, step: Step, hidden: Tensor) -> Tensor:
        """Run the part loaded last on the tokens of one step."""
        assert self._compute is not None
        device, dtype = self._place.device, self._place.dtype
        pads = device.type == "cpu" and dtype is not torch.float32
        if device.type == "cuda":
            torch.cuda.set_device(device)
        batch = Batch.of(step, self._tokens_per_block, device, dtype, reaches=self.spec.reaches, pads=pads)
        return self._compute(batch, hidden.to(device))

    def leave(self) -> None:
        """Disconnect from the other ranks; those that wait for this one get an error."""
        self._ranks.leave()

    def finish(self) -> None:
        """Raises ForgeError naming tensors that were not used."""
        self._stored.finish()

    def close(self) -> None:
        """Close the file."""
        self._stored.close()

    def _loader(self, packed: dict[str, Tensor] | None) -> Loader:
        """The loader of packed tensors; None: of the engine's rank file, which is already packed."""
        weights = self._stored if packed is None else Weights.of(packed)
        return Loader.of(self.spec, self._kernels, weights, self._place, self._ranks, self._sparse)


def _connector(source: Source, placements: Sequence[Placement]) -> Callable[[int], Collective]:
    """A function that connects a rank to the others; all ranks must call it concurrently."""
    if source.config.parallel.world_size == 1:
        return lambda index: Alone()
    store, port = serve_store()
    sums = SharedSums.of(placements[0], source.config.parallel.tp, source.config.parallel.pp)

    def connect(index: int) -> Collective:
        ranks = Distributed(source.spec(index), index, placements[index].device, sums)
        ranks.connect(store if index == 0 else join_store(port))
        return ranks

    return connect


def _require_computable(source: Source, sequences: Sequence[Sequence[int]]) -> None:
    longest, vocab = source.limits.max_seq_len, source.config.vocab_size
    for tokens in sequences:
        if not 0 < len(tokens) <= longest:
            raise ForgeError(
                f"a sequence of {len(tokens)} tokens cannot be computed", hint=f"Give 1 to {longest:,} tokens."
            )
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise ForgeError(f"token ids outside of the vocabulary of {vocab}", hint="Use the tokenizer of this model.")


def _chunks(tokens: Sequence[int], tokens_per_block: int) -> list[Step]:
    """The steps of one sequence, in order."""
    table = np.arange(-(-len(tokens) // tokens_per_block), dtype=np.int64).reshape(1, -1)
    steps = []
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        part = np.array(tokens[start : start + TOKENS_AT_ONCE], dtype=np.int64)
        count, first = np.array([len(part)], dtype=np.int64), np.array([start], dtype=np.int64)
        steps.append(Step(first, count, count, table, part, length=len(tokens)))
    return steps
