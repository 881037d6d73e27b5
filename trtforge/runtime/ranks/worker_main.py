"""Worker process of a rank other than 0: `python -m trtforge.runtime.ranks.worker_main JOB`.

It exits when its standard input is closed, so it never outlives rank 0.
"""

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from trtforge.core.errors import ForgeError
from trtforge.core.memory_errors import out_of_memory
from trtforge.runtime.ranks.block_contents import BlockContents
from trtforge.runtime.ranks.distributed import Distributed, join_store, loaded_key
from trtforge.runtime.ranks.rank_model import RankModel, placement_of
from trtforge.runtime.ranks.shared_sums import SharedSums
from trtforge.runtime.ranks.source import open_model
from trtforge.runtime.ranks.worker_process import WorkerJob
from trtforge.runtime.scheduling.step_codec import asked_block, asked_moves, decode


def main() -> int:
    """Load the rank, connect to the others and compute steps until rank 0 ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole process group; rank 0 decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = WorkerJob.model_validate_json(sys.argv[1])
    try:
        _run(job)
    except Exception as error:
        failure = error if isinstance(error, ForgeError) else out_of_memory(error)
        if failure is None:
            raise
        print(f"error: {failure.message}\nhint: {failure.hint}", file=sys.stderr, flush=True)
        return 1
    return 0


def _run(job: WorkerJob) -> None:
    torch.set_num_threads(job.threads)
    sent = None if job.sent_adapters is None else Path(job.sent_adapters)
    source = open_model(Path(job.directory), job.device, job.compute_dtype)
    source = replace(source, sent_adapters=sent, beside=job.beside)
    place = placement_of(source, job.index)
    parallel = source.config.parallel
    sums = None if job.shared_sums is None else SharedSums.of(place, parallel.tp, parallel.pp, job.shared_sums)
    ranks = Distributed(source.spec(job.index), job.index, place.device, sums)
    with torch.inference_mode():
        model = RankModel(source, job.index, place, ranks)
        store = join_store(job.port)
        store.set(loaded_key(job.index), "1")
        ranks.connect(store)
        model.allocate(job.memory)
        contents = BlockContents(ranks.of_all(model.block_bytes))
        while True:
            values = ranks.broadcast_step(None)
            block = asked_block(values)
            if block is not None:
                ranks.gather_bytes(model.block_content(block), contents.sizes)
                continue
            moves = asked_moves(values)
            if moves is not None:
                model.move(moves)
                continue
            step = decode(values)
            model.execute(step, contents.fills(step, job.index))


def _end_with_parent() -> None:
    """Exit when rank 0 closes our standard input. os._exit, because the main thread may wait in a collective."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
