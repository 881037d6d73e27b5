"""All ranks of a model: rank 0 in this process, the others in worker processes that share its cores."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.core.memory_errors import out_of_memory
from trtforge.machine.cgroups import processors
from trtforge.runtime.decoder.collective import Alone, Collective
from trtforge.runtime.decoder.eagle import Network
from trtforge.runtime.decoder.kv_capacity import KvMemory
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.threads import release_threads
from trtforge.runtime.ranks.block_contents import BlockContents
from trtforge.runtime.ranks.distributed import Distributed, loaded_key, serve_store
from trtforge.runtime.ranks.rank_model import RankModel, placement_of
from trtforge.runtime.ranks.shared_sums import SharedSums
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.ranks.worker_process import WorkerJob, WorkerProcess
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints
from trtforge.runtime.scheduling.step_codec import encode, encode_moves, encode_question

_END_TIMEOUT = 3.0  # seconds that a worker has to end by itself
_PARAMETERS_PER_THREAD = 1_000_000  # of a layer; with fewer, another thread was measured to cost more than it saves
_MEMORY = KvMemory()


class RankGroup:
    """Computes steps on every rank. Used by one thread at a time; `close` ends the workers.

    `threads`: total of all ranks; by default chosen from the model's size and the number of cores.
    """

    def __init__(
        self,
        source: Source,
        *,
        threads: int | None = None,
        memory: KvMemory = _MEMORY,
    ) -> None:
        world = source.config.parallel.world_size
        useful = -(-source.spec(0).layer_parameters // _PARAMETERS_PER_THREAD)
        cores = processors() // world
        self.threads = max(1, threads // world if threads else min(cores, useful))
        self._workers: list[WorkerProcess] = []
        self._closed = False
        self._loaded: RankModel | None = None
        place = placement_of(source, 0)
        self.computes_ahead = place.device.type == "cuda" and world == 1  # other ranks do not know the sampled tokens
        """Whether a step may begin before the host knows the tokens of the previous step."""
        try:
            if world == 1:
                self._collective: Collective = Alone()
                self._loaded = RankModel(source, 0, place, self._collective)
            else:
                sums = SharedSums.of(place, source.config.parallel.tp, source.config.parallel.pp)
                self._collective = distributed = Distributed(source.spec(0), 0, place.device, sums)
                store, port = serve_store()
                self._workers = [
                    WorkerProcess(
                        WorkerJob(
                            directory=str(source.directory.absolute()),
                            sent_adapters=None if source.sent_adapters is None else str(source.sent_adapters),
                            beside=source.beside,
                            device=source.forge.device,
                            compute_dtype=source.forge.compute_dtype,
                            index=index,
                            port=port,
                            threads=self.threads,
                            memory=memory,
                            shared_sums=None if sums is None else sums.descriptor,
                        ),
                        on_end=None if sums is None else sums.end,
                    )
                    for index in range(1, world)
                ]
                self._loaded = RankModel(source, 0, place, distributed)
                for worker in self._workers:
                    while not store.check([loaded_key(worker.index)]):
                        worker.check()
                        time.sleep(0.01)
                distributed.connect(store)
            self.num_blocks, self.num_host_blocks, self.num_window_blocks = self._model.allocate(memory)
            self._contents = BlockContents(self._collective.of_all(self._model.block_bytes))
            kernels = native_for(place.device, place.dtype)
            if kernels is not None:
                release_threads(kernels)  # the engine's thread computes from here on
        except BaseException as error:
            failure = out_of_memory(error) or (self._failure() if isinstance(error, RuntimeError) else None)
            self.close()
            if failure is None:
                raise
            raise failure from error

    @property
    def _model(self) -> RankModel:
        """Rank 0."""
        assert self._loaded is not None, "it was freed"
        return self._loaded

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(worker.pid for worker in self._workers)

    @torch.inference_mode()
    def last_hidden(self) -> Tensor:
        """See `Decoder.last_hidden`; only without pipeline parallelism."""
        return self._model.last_hidden()

    @torch.inference_mode()
    def hidden_states(self) -> Tensor:
        """See `Decoder.hidden_states`; only with an EAGLE network on rank 0."""
        return self._model.hidden_states()

    @property
    def network(self) -> Network:
        """The EAGLE network on rank 0."""
        return self._model.network

    def check(self) -> None:
        """Raises ForgeError with the message of a rank that ended."""
        for worker in self._workers:
            worker.check()

    @torch.inference_mode()
    def execute(
        self, step: Step, fills: Mapping[int, Tensor] | None = None, latest: Tensor | None = None
    ) -> Tensor | None:
        """float32 logits of the wanted rows; the next step may overwrite them. See `RankModel.execute`.

        `fills`: contents that `read_block` returned, by the block to overwrite with them. `latest`: only with a single
        rank. Raises ForgeError with the message of the rank that ended first.
        """
        try:
            if self._workers:
                self._collective.broadcast_step(encode(self._contents.with_fills(step, fills or {})))
            own = {block: self._contents.part(content, 0) for block, content in (fills or {}).items()}
            return self._model.execute(step, own, latest)
        except RuntimeError as error:
            failure = self._failure()
            if failure is None:
                raise
            raise failure from error

    @torch.inference_mode()
    def move(self, slots: Ints) -> None:
        """Copy the contents of KV cache slots, int64 (2 x moves,): from, to, from, to. All are read before any is
        written. Raises ForgeError as `execute` does."""
        if not len(slots):
            return
        try:
            if self._workers:
                self._collective.broadcast_step(encode_moves(slots))
            self._model.move(slots)
        except RuntimeError as error:
            failure = self._failure()
            if failure is None:
                raise
            raise failure from error

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block on all ranks."""
        return self._contents.bytes

    @property
    def block_layout(self) -> str:
        """Identifies the layout of a block: types and shapes on rank 0, bytes on each rank."""
        shapes = [(str(layer.dtype), *layer.shape[1:]) for layer in self._model.cache]
        return f"{shapes}" if len(self._contents.sizes) == 1 else f"{shapes} {list(self._contents.sizes)}"

    @torch.inference_mode()
    def read_block(self, block: int) -> Tensor:
        """The content of a KV block on all ranks between two steps, uint8 (block_bytes,) in host memory.

        Raises RuntimeError if a rank has ended.
        """
        if self._workers:
            self._collective.broadcast_step(encode_question(block))
        parts = self._collective.gather_bytes(self._model.block_content(block), self._contents.sizes)
        assert parts is not None, "rank 0 has what all ranks sent"
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def free(self) -> None:
        """Free the memory of rank 0. No step may be computed after this."""
        self._loaded = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the workers, and with them a step that waits for them. May be called again."""
        self._closed = True
        for worker in self._workers:
            worker.release()
        deadline = time.monotonic() + _END_TIMEOUT
        for worker in self._workers:
            worker.end(deadline)
        self._workers, self._collective = [], Alone()

    def _failure(self) -> ForgeError | None:
        """Error of the worker that ended first; None if all run. Waits, because a worker's connections close before it
        has ended."""
        if self._closed:
            return ForgeError("the engine was closed while a rank did not answer", hint="Load it again.")
        deadline = time.monotonic() + _END_TIMEOUT
        while self._workers and time.monotonic() < deadline:
            if any(worker.ended_at is not None for worker in self._workers):
                time.sleep(0.05)
                ended = [worker for worker in self._workers if worker.ended_at is not None]
                return min(ended, key=lambda worker: worker.ended_at or 0.0).failure()
            time.sleep(0.01)
        return self._failure() if self._closed else None
