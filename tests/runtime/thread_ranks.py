"""Ranks as threads of this process: the exchanges of an engine without the seconds that its processes take to start."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from trtforge.runtime.decoder.collective import Alone, Collective
from trtforge.runtime.decoder.eagle import Network
from trtforge.runtime.ranks.distributed import Distributed, join_store, serve_store
from trtforge.runtime.ranks.rank_model import RankModel, placement_of
from trtforge.runtime.ranks.shared_sums import SharedSums
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints
from trtforge.runtime.scheduling.step_codec import decode, encode


class ThreadRanks:
    """Stands in for a RankGroup. Blocks that leave the cache are kept in host memory, as far as it has blocks.

    `computes_ahead` may be set: a CPU has nothing to gain from it, but computes the same.
    """

    threads = 1
    computes_ahead = False

    def __init__(self, source: Source, blocks: int, host_blocks: int = 20, window_blocks: int = 0) -> None:
        self.num_blocks, self.num_host_blocks, self.num_window_blocks = blocks, host_blocks, window_blocks
        world = source.config.parallel.world_size
        self._pool = ThreadPoolExecutor(world)
        store, port = serve_store()
        sums = SharedSums.of(placement_of(source, 0), source.config.parallel.tp, source.config.parallel.pp)

        others = replace(source, eagle=None)  # which only rank 0 of a RankGroup has

        @torch.inference_mode()
        def load(index: int) -> RankModel:
            ranks: Collective = Alone()
            place = placement_of(source, index)
            if world > 1:
                ranks = distributed = Distributed(source.spec(index), index, place.device, sums)
                distributed.connect(store if index == 0 else join_store(port))
            model = RankModel(source if index == 0 else others, index, place, ranks)
            model.allocate_cache(blocks, host_blocks, window_blocks)
            return model

        self.models = list(self._pool.map(load, range(world)))

    def execute(
        self, step: Step, fills: Mapping[int, Tensor] | None = None, latest: Tensor | None = None
    ) -> Tensor | None:
        """float32 logits of the rows wanted. `fills`, `latest`: of a single rank."""
        assert not fills or len(self.models) == 1, "several ranks store no blocks"
        assert latest is None or len(self.models) == 1, "other ranks know no sampled tokens"

        @torch.inference_mode()
        def run(model: RankModel) -> Tensor | None:
            return model.execute(decode(encode(step)), fills, latest)

        first, *_ = self._pool.map(run, self.models)
        return first

    @torch.inference_mode()
    def move(self, slots: Ints) -> None:
        """As of a RankGroup."""
        for model in self.models:
            model.move(slots)

    @torch.inference_mode()
    def last_hidden(self) -> Tensor:
        """As of a RankGroup."""
        return self.models[0].last_hidden()

    @torch.inference_mode()
    def hidden_states(self) -> Tensor:
        """As of a RankGroup."""
        return self.models[0].hidden_states()

    @property
    def network(self) -> Network:
        """As of a RankGroup."""
        return self.models[0].network

    def free(self) -> None:
        """As of a RankGroup, but nothing is freed: another engine may use them."""

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
