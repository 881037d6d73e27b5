"""The decoder of one rank: embedding, layers, final norm and logits, for packed tokens and a paged cache."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from trtforge.runtime.adapters.rank_adapters import RankAdapters
from trtforge.runtime.architecture.rotary import Rotary
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.collective import Collective
from trtforge.runtime.decoder.embedding import load_embedding
from trtforge.runtime.decoder.kv_cache import LayerCache, Scratch, in_place_for, storage_dtype, zeros
from trtforge.runtime.decoder.layer import kv_scale, load_layer
from trtforge.runtime.decoder.loader import Loader
from trtforge.runtime.decoder.logits import Head, finished_logits
from trtforge.runtime.decoder.recorded import Layers
from trtforge.runtime.linears.kernels import Kernels
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.bindings import Native, native_for
from trtforge.runtime.native.experts import widened
from trtforge.runtime.native.recorder import narrow_recording
from trtforge.runtime.native.tiles import TILE


class Decoder:
    """Computes steps with the packed tensors of `pack_rank`; unused tensors are an error."""

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        weights: Weights,
        place: Placement,
        longest: int,
        ranks: Collective,
        adapters: RankAdapters | None = None,
        kept: tuple[int, ...] | None = None,
    ) -> None:
        """`kept`: layers whose inputs `hidden_states` returns; (): the LM head's input; None: it is not called."""
        self.spec = spec
        self.place = place
        self._ranks = ranks
        self._native = native_for(place.device, place.dtype)
        self._quantized = kernels.quantized
        self._rotaries = [Rotary(rotary, longest, place.device) for rotary in spec.rotaries]
        loader = Loader.of(spec, kernels, weights, place, ranks, adapters=adapters)
        layers = [load_layer(loader, index) for index in range(spec.num_layers)]
        self.layers = Layers(layers, self._native if spec.linear is None else None, longest, adapters, kept or ())
        self._kept = kept
        self._kv_scales = [kv_scale(loader, index) for index in range(spec.num_layers)]
        self.embedding = load_embedding(loader) if spec.first else None
        self.head = Head(loader) if spec.last else None
        self._last: Tensor | None = None
        self._states: list[Tensor] = []
        weights.finish()

    @cached_property
    def reads_in_place(self) -> bool:
        """Whether kernels read the cache in place for attention of single-token rows, and on a GPU also of chunks."""
        spec, kernels = self.spec, in_place_for(self.place.device, self.place.dtype)
        by_torch = spec.network.coarse_alibi and spec.position in ("alibi", "scaled_alibi")
        return kernels is not None and not by_torch and kernels.attends(spec.cached[-1])

    @property
    def _alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.spec.tp == 1 and self.spec.pp == 1

    @property
    def repeats(self) -> bool:
        """Whether steps with equally many single-token rows, or prompt tokens, run the same operations on one rank."""
        spec = self.spec
        return self._alone and self.reads_in_place and spec.moe is None and spec.linear is None

    @property
    def recordable(self) -> Native | None:
        """The CPU kernels, if steps of single-token rows may consist of their calls only; else None."""
        spec = self.spec
        return self._native if spec.pp == 1 and self.reads_in_place and spec.linear is None else None

    @property
    def takes_any_rows(self) -> bool:
        """Whether products take any number of rows without oneDNN, which compiles a kernel for each number."""
        spec, kernels = self.spec, self._native
        if kernels is None or not kernels.multiplies:
            return False
        by_torch = self._quantized == "int8_sq_cpu" and not kernels.multiplies_integers
        by_torch = by_torch or spec.latent is not None or spec.linear is not None
        return not by_torch and spec.vocab_share % TILE == 0

    def new_cache(self, num_blocks: int, tokens_per_block: int, window_blocks: int = 0) -> list[LayerCache]:
        """An empty cache for every layer. Zeroed, because masked values must be finite too.

        `window_blocks`: number of separate blocks of sliding-window layers; 0 if they have none. Blocks of a linear
        attention layer contain no tokens, because the layer keeps its states itself.
        """
        spec = self.spec
        dtype = storage_dtype(spec.kv_format, self.place.dtype)
        scratch = Scratch()
        cache = []
        for layer, scale in zip(spec.layers, self._kv_scales, strict=True):
            blocks = window_blocks if window_blocks and layer.window is not None else num_blocks
            shape = (blocks, 0 if layer.linear else tokens_per_block, *spec.cached)
            storage = zeros(shape, dtype, self.place.device)
            cache.append(LayerCache(storage, scale, self.place.dtype, scratch))
        return cache

    def forward(self, batch: Batch, cache: list[LayerCache]) -> Tensor | None:
        """This rank's columns of the wanted rows' logits, for `logits`; None if no row is wanted.

        With CPU kernels and a single rank they are float32. All pipeline stages except the last return None and send
        the hidden states to the next stage.
        """
        place = self.place
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens, batch.positions, batch.virtual)
        else:
            empty = torch.empty(len(batch.tokens), self.spec.hidden_size, dtype=place.dtype, device=place.device)
            hidden = self._ranks.receive_hidden(empty)
        rotations = tuple(rotary.at(batch.positions, place.dtype, batch.length) for rotary in self._rotaries)
        hidden = self.layers(hidden, batch, rotations, cache)
        if self._kept is not None:
            states = self.layers.states if self._kept else [hidden]
            self._states = [each[: len(batch.slots)] for each in states]
        if self.head is None:
            self._ranks.send_hidden(hidden)
            return None
        narrow_recording()
        self._last = self._wanted(hidden, batch)
        if not batch.wanted:
            return None
        columns = self.head(self._last)[: batch.wanted]
        return widened(self._native, columns) if self._native is not None and self._alone else columns

    def logits(self, parts: Sequence[Tensor | None], wanted: int) -> Tensor | None:
        """float32 logits (wanted, vocabulary) from results of `forward`, on rank 0; else, or if `wanted` is 0, None.

        Every rank must call it once per step.
        """
        self._ranks.finish_sending()
        if wanted == 0:
            return None
        known = [part for part in parts if part is not None]
        own = None if not known else known[0] if len(known) == 1 else torch.cat(known)
        logits = self._ranks.gather_logits(own, wanted, self.spec.vocab_share, self.place.dtype)
        return None if logits is None else finished_logits(logits, self.spec)

    @property
    def kept(self) -> tuple[Tensor | None, list[Tensor]]:
        """The results of the last step that `last_hidden` and `hidden_states` read."""
        return self._last, self._states

    def keep(self, last: Tensor | None, states: list[Tensor]) -> None:
        """Set `kept` to what a graph computed."""
        self._last, self._states = last, states

    def last_hidden(self) -> Tensor:
        """(wanted rows, hidden) of the last step after the final norm, on the last pipeline stage."""
        assert self.head is not None, "another pipeline stage"
        assert self._last is not None, "before the first step"
        return self.head.normed(self._last)

    def hidden_states(self) -> Tensor:
        """(tokens, width) of all tokens of the last step: the inputs of the `kept` layers side by side, or the LM
        head's input. The next step may overwrite it."""
        assert self.head is not None, "another pipeline stage"
        return torch.cat(self._states, dim=1) if self._kept else self.head.normed(self._states[0])

    @staticmethod
    def _wanted(hidden: Tensor, batch: Batch) -> Tensor:
        """The rows whose logits are wanted."""
        if batch.wanted == len(batch.slots):
            return hidden
        return hidden[: batch.wanted] if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
