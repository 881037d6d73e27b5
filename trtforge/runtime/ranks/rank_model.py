"""One rank of an engine: its decoder, its KV cache, and the steps it computes."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.attention_windows import partial_window, widest_window, window_blocks_for
from trtforge.runtime.adapters.rank_adapters import RankAdapters
from trtforge.runtime.architecture.positions import Reach
from trtforge.runtime.cuda.graph_capture import graph_capture_for
from trtforge.runtime.cuda.pinned import sent
from trtforge.runtime.decoder.batch import Batch
from trtforge.runtime.decoder.block_copies import BlockCopies
from trtforge.runtime.decoder.collective import Collective
from trtforge.runtime.decoder.decoder import Decoder
from trtforge.runtime.decoder.eagle import Network, spare_blocks
from trtforge.runtime.decoder.graph_memory import CommonMemory, PaddedMemory
from trtforge.runtime.decoder.kv_cache import LayerCache
from trtforge.runtime.decoder.kv_capacity import KvMemory, block_bytes, block_count, host_block_count
from trtforge.runtime.decoder.prompt_memory import PromptMemory, prompt_graph_bytes
from trtforge.runtime.decoder.recorded import Layers
from trtforge.runtime.decoder.step_graphs import Outputs, StepGraphs
from trtforge.runtime.decoder.working_memory import graph_logits_bytes, step_bytes
from trtforge.runtime.linears.kernels import DTYPES
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.linears.packing import pack_rank
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.native.call_capture import CallCapture
from trtforge.runtime.native.pages_ahead import PagesAhead
from trtforge.runtime.ranks.micro_batches import micro_batches
from trtforge.runtime.ranks.single_tokens import logits_first, single_tokens
from trtforge.runtime.ranks.source import EagleDrafts, Source
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints

_LEAST_TOKENS = {"cpu": 16, "cuda": 256}
"""Minimum tokens of a micro-batch: products of fewer take about as long as reading the weights."""


class RankModel:
    """Executes steps; every rank must execute the same ones in the same order."""

    def __init__(self, source: Source, index: int, place: Placement, ranks: Collective) -> None:
        spec = source.spec(index)
        weights = Weights.open(source.directory, index)
        if not source.packed:
            weights = Weights.of(pack_rank(source.config, index, weights, source.forge.kernels, place.dtype))
        self._source = source
        self._place = place
        lora = source.forge.features.lora
        sent = source.sent_adapters
        self.adapters = None if lora is None else RankAdapters(source.directory, lora, source.config, spec, place, sent)
        longest = source.limits.max_seq_len
        drafts = source.eagle if index == 0 else None
        kept = None if drafts is None else drafts.network.layers or ()
        self._decoder = Decoder(spec, source.forge.kernels, weights, place, longest, ranks, self.adapters, kept)
        self._network = None if drafts is None else self._load_network(drafts)
        self._ranks = ranks
        self._cache: list[LayerCache] = []
        self._copies: BlockCopies | None = None
        self._window_copies: BlockCopies | None = None
        self._windowed = False
        self._graphs: StepGraphs | None = None
        self._prompts: StepGraphs | None = None
        self._pages: tuple[PagesAhead, PagesAhead] | None = None
        self._order: Tensor | None = None  # order of the last step's tokens when computed; None: unchanged
        room = prompt_graph_bytes(spec, place.dtype)
        self._capture = graph_capture_for(place.device, room) if self._decoder.repeats else None
        self._calls = None if self._decoder.recordable is None else CallCapture(self._decoder.recordable)

    def allocate(self, memory: KvMemory) -> tuple[int, int, int]:
        """Allocate as many KV blocks as fit on every rank. Returns their numbers on the device, in host memory, and
        for sliding-window layers, 0 if these share the blocks of the other layers.

        Raises ForgeError if there is no room.
        """
        window_blocks = self._wanted_window_blocks if memory.windows and not memory.host_bytes else 0
        num_blocks = self._ranks.smallest(self.blocks_that_fit(memory.fraction, memory.tokens, window_blocks))
        host_blocks = self._ranks.smallest(self.host_blocks_that_fit(memory.host_bytes, num_blocks))
        window_blocks = window_blocks if window_blocks < num_blocks else 0
        self.allocate_cache(num_blocks, host_blocks, window_blocks)
        return num_blocks, host_blocks, window_blocks

    @property
    def _wanted_window_blocks(self) -> int:
        """Number of separate blocks that sliding-window layers need; 0 if they share the other layers' blocks."""
        window, limits = partial_window(self._source.config), self._source.limits
        if window is None or window >= limits.max_seq_len:
            return 0
        return window_blocks_for(window, self._source.tokens_per_block, limits.max_batch_size, limits.max_num_tokens)

    def blocks_that_fit(self, fraction: float, tokens: int | None, window_blocks: int = 0) -> int:
        """The number of KV blocks that this rank has memory for."""
        source = self._source
        reserved = 0 if self.adapters is None else self.adapters.reserved_bytes
        spec, size = self._decoder.spec, source.tokens_per_block
        beside = source.beside_rank(spec.rank.index)
        drafter = beside.block + (0 if self._network is None else self._network.block_bytes(size))
        reserved += beside.weights + drafter * self._spare_blocks
        if spec.first:
            rows = source.forge.features.max_prompt_embedding_table_size
            reserved += rows * spec.hidden_size * self._place.dtype.itemsize
        if self._place.device.type == "cuda":
            reserved += step_bytes(spec, self._place.dtype, source.limits)
        if self._capture is not None:
            graphs = prompt_graph_bytes(spec, self._place.dtype) + graph_logits_bytes(spec, source.limits)
            reserved += block_bytes(spec, self._place.dtype, size) + graphs
        return block_count(spec, self._place, source.limits, size, fraction, tokens, reserved, drafter, window_blocks)

    def host_blocks_that_fit(self, memory: int, num_blocks: int) -> int:
        """KV blocks that fit in `memory` bytes of host memory, beside `num_blocks` on the device. Raises ForgeError if
        these bytes are not free."""
        source, spec = self._source, self._decoder.spec
        own = 0 if self._network is None else self._network.block_bytes(source.tokens_per_block)
        size = block_bytes(spec, self._place.dtype, source.tokens_per_block) + own
        beside = source.beside_rank(spec.rank.index)
        taken = num_blocks * (size + beside.block) + beside.weights if self._place.device.type == "cpu" else 0
        return host_block_count(memory, size, spec.tp * spec.pp, taken)

    def allocate_cache(self, num_blocks: int, host_blocks: int = 0, window_blocks: int = 0) -> None:
        """Allocate `num_blocks` KV blocks, and more in host memory; required before the first step.

        `window_blocks`: number of separate blocks of sliding-window layers; 0 if they share the other layers' blocks.
        """
        size, longest = self._source.tokens_per_block, self._source.limits.max_seq_len
        spare = int(self._capture is not None)
        self._cache = self._decoder.new_cache(num_blocks + spare, size, window_blocks + spare if window_blocks else 0)
        columns = -(-longest // size)
        outputs = partial(_outputs, self._decoder, self._layer_caches)  # without self: a cycle would keep the memory
        if self._capture is not None:
            padded = PaddedMemory(columns, size, num_blocks, self._place.device, window_blocks or None)
            self._graphs = StepGraphs(outputs, self._capture, padded)
            if self._decoder.spec.latent is None:  # latent attention reads a chunk's blocks with torch
                prompts = PromptMemory(size, num_blocks, self._place.device, window_blocks or None)
                self._prompts = StepGraphs(outputs, self._capture, prompts)
        elif self._calls is not None:
            common = CommonMemory(columns, size, windowed=window_blocks > 0)
            self._graphs = StepGraphs(outputs, self._calls, common)
        if self._network is not None:
            self._cache.append(self._network.allocate_cache(num_blocks + self._spare_blocks, size))
        self._windowed = window_blocks > 0
        layers = enumerate(self._decoder.spec.layers)
        windowed = {index for index, layer in layers if window_blocks and layer.window is not None}
        others = [tensor for index, tensor in enumerate(self.cache) if index not in windowed]
        sliding = [self.cache[index] for index in sorted(windowed)]
        self._copies = BlockCopies(others, num_blocks, host_blocks)
        self._window_copies = BlockCopies(sliding, window_blocks, 0)
        if self._place.device.type == "cpu":
            self._pages = PagesAhead(others), PagesAhead(sliding)

    @property
    def layers(self) -> Layers:
        """The decoder's layers."""
        return self._decoder.layers

    @property
    def graphs(self) -> StepGraphs | None:
        """The graphs of steps with single-token rows; None if such steps cannot be captured."""
        return self._graphs

    @property
    def prompt_graphs(self) -> StepGraphs | None:
        """The graphs of whole prompts; None if these cannot be captured, as on a CPU."""
        return self._prompts

    @property
    def cache(self) -> list[Tensor]:
        """The cache tensor of each layer, then that of the EAGLE network."""
        return [layer.storage for layer in self._cache]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(layer[0].nbytes for layer in self.cache)

    def block_content(self, block: int) -> Tensor:
        """A block's content for all layers, one after another: uint8 (bytes,) in host memory."""
        return torch.cat([layer[block].reshape(-1).view(torch.uint8).cpu() for layer in self.cache])

    def move(self, slots: Ints) -> None:
        """See `RankGroup.move`."""
        sources, targets = (sent(each, self._place.device) for each in slots.reshape(-1, 2).T)
        for layer in self.cache:
            held = layer.flatten(0, 1)
            held.index_copy_(0, targets, held.index_select(0, sources))

    def last_hidden(self) -> Tensor:
        """See `Decoder.last_hidden`."""
        return self._decoder.last_hidden()

    def hidden_states(self) -> Tensor:
        """See `Decoder.hidden_states`."""
        states = self._decoder.hidden_states()
        if self._order is None:
            return states
        ordered = torch.empty_like(states)
        ordered[self._order] = states
        return ordered

    @property
    def network(self) -> Network:
        """The EAGLE network that runs beside the model."""
        assert self._network is not None, "only with an EAGLE feature, and on rank 0"
        return self._network

    @property
    def _spare_blocks(self) -> int:
        drafts, source = self._source.eagle, self._source
        if drafts is None:
            return 0
        return spare_blocks(source.limits.max_batch_size, len(drafts.shape.followed), source.tokens_per_block)

    def _load_network(self, drafts: EagleDrafts) -> Network:
        config, decoder = self._source.config, self._decoder
        assert decoder.embedding is not None, "one pipeline stage"
        assert decoder.head is not None, "one pipeline stage"
        model = config.vocab_size, decoder.embedding.tokens, decoder.head.linear
        reach, longest = Reach(widest_window(config)), self._source.limits.max_seq_len
        return Network(drafts.network, self._place, reach, longest, model)

    def execute(
        self, step: Step, fills: Mapping[int, Tensor] | None = None, latest: Tensor | None = None
    ) -> Tensor | None:
        """float32 logits of the wanted rows on rank 0; None on other ranks, and if no row is wanted. The next step may
        overwrite them.

        `fills`: new contents of blocks, written after the step's copies: bytes of all layers, one after another.
        `latest`: see `put_latest`; only with a single rank.
        """
        assert self._copies is not None, "see allocate_cache"
        assert self._window_copies is not None, "see allocate_cache"
        assert self._windowed is (len(step.window_tables) > 0), "window tables come with separate window blocks"
        if self._pages is not None:
            for pages, tables in zip(self._pages, (step.tables, step.window_tables), strict=True):
                pages.reach(int(tables.max(initial=max(fills or [-1]))) + 1, len(tables))
        if len(step.copies):
            self._copies.copy(step.copies)
        if len(step.window_copies):
            self._window_copies.copy(step.window_copies)
        for block_index, content in (fills or {}).items():
            parts = content.split([layer.storage[0].nbytes for layer in self._cache])
            for layer, part in zip(self._cache, parts, strict=True):
                layer.fill(block_index, part)
        found = []
        self._order = None
        for part in self._parts(step):
            if self._decoder.head is not None:
                self._decoder.head.need(part.candidates, part.draws)
            if self.adapters is not None:
                self.adapters.begin(part)
            replayed = self._replayed(part, latest)
            if replayed is not None:
                self._decoder.keep(replayed.last, replayed.states)
                found.append(replayed.logits)
                continue
            found.append(self._decoder.forward(self._batch(part, latest), self._layer_caches))
        return self._decoder.logits(found, int(step.wanted.sum()))

    def _replayed(self, step: Step, latest: Tensor | None) -> Outputs | None:
        """The outputs of a step from its graph; None, with nothing computed, if there is no graph for it."""
        for graphs in (self._graphs, self._prompts):
            found = None if graphs is None else graphs.execute(step, latest)
            if found is not None:
                return found
        return None

    def _batch(self, step: Step, latest: Tensor | None) -> Batch:
        """The step as input of the decoder's layers."""
        device, dtype, decoder = self._place.device, self._place.dtype, self._decoder
        return Batch.of(
            step,
            self._source.tokens_per_block,
            device,
            dtype,
            reaches=decoder.spec.reaches,
            pads=device.type == "cpu" and dtype is not torch.float32 and not decoder.takes_any_rows,
            in_place=decoder.reads_in_place,
            latest=latest,
        )

    @property
    def _layer_caches(self) -> list[LayerCache]:
        return self._cache[: self._decoder.spec.num_layers]

    def _parts(self, step: Step) -> list[Step]:
        """The micro-batches of a step, rewritten as single tokens if short chunks are recorded. With linear attention,
        the step is not split."""
        spec = self._decoder.spec
        stages = 1 if spec.linear is not None else spec.pp
        parts = micro_batches(step, stages, _LEAST_TOKENS[self._place.device.type])
        if not self._records_chunks:
            return parts
        made = [single_tokens(part) for part in parts]
        if self._network is not None and made[0] is not parts[0]:  # there is one stage, and so one part
            self._order = torch.from_numpy(logits_first(parts[0])).to(self._place.device)
        return made

    @property
    def _records_chunks(self) -> bool:
        """Whether short prompt chunks are recorded as single tokens. Not with latent attention, where these cost more.

        It is the same on all ranks, which must agree on the order of rows.
        """
        if self._calls is None or self._graphs is None or self._decoder.spec.latent is not None:
            return False
        return self._graphs.can_capture or self.layers.can_record


def placement_of(source: Source, index: int) -> Placement:
    """Device and dtype of a rank: the CPU, or the GPU with its index. Raises ForgeError if that does not exist."""
    dtype = DTYPES[source.forge.compute_dtype]
    if source.forge.device == "cpu":
        return Placement(torch.device("cpu"), dtype)
    if torch.cuda.device_count() <= index:
        raise ForgeError(
            f"rank {index} needs GPU {index}, this machine has {torch.cuda.device_count()}",
            hint="Compile the checkpoint with `--device cpu`, or convert it to fewer ranks.",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return Placement(device, dtype)


def _outputs(decoder: Decoder, caches: list[LayerCache], batch: Batch) -> Outputs:
    """The outputs of a step, as graphs compute them."""
    logits = decoder.forward(batch, caches)
    return Outputs(logits, *decoder.kept)
