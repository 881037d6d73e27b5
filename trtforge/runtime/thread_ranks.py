"""Ranks as threads of this process: the exchanges of an engine, and what happens inside of it can be watched.

Processes (runtime.ranks) are faster; they take seconds to start and show nothing but logits.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from trtforge.runtime.batch import Step
from trtforge.runtime.collective import Alone, Collective
from trtforge.runtime.decoder import Observe
from trtforge.runtime.distributed import Distributed, join_store, serve_store
from trtforge.runtime.rank import RankModel, place_of
from trtforge.runtime.source import Source


class ThreadRanks:
    """Stands in for a RankGroup. `observe` is told of the hidden states after every layer, by the layer's number."""

    threads = 1

    def __init__(self, source: Source, blocks: int, observe: Observe | None = None) -> None:
        self.num_blocks = blocks
        world = source.config.parallel.world_size
        self._pool = ThreadPoolExecutor(world)
        store, port = serve_store()

        @torch.inference_mode()
        def load(index: int) -> RankModel:
            ranks: Collective = Alone()
            place = place_of(source, index)
            if world > 1:
                ranks = distributed = Distributed(source.spec(index), index, place.device)
                distributed.connect(store if index == 0 else join_store(port))
            model = RankModel(source, index, place, ranks)
            model.allocate_cache(blocks)
            if observe is not None and source.spec(index).rank.tp_rank == 0:
                model.observe(observe)
            return model

        self._models = list(self._pool.map(load, range(world)))

    def execute(self, step: Step) -> Tensor | None:
        """float32 logits of the rows wanted."""

        @torch.inference_mode()
        def run(model: RankModel) -> Tensor | None:
            return model.execute(Step.decode(step.encode()))

        first, *_ = self._pool.map(run, self._models)
        return first

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
