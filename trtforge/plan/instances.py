"""Several instances of one engine on the GPUs of a node, `serving.gpu_device_ids`: their total memory.

Each instance is the planned deployment: its own weights, its own KV pool. Several instances may have ranks on one GPU.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trtforge.plan.evaluation import Evaluation
from trtforge.plan.legality import Problem


@dataclass(frozen=True)
class Instances:
    """All instances together. `gpus`: number of their GPUs; `per_gpu`: bytes on the fullest GPU, `total` on all.

    `shared`: the most ranks on one GPU. `max_concurrency`: requests of full length that fit their KV pools.
    """

    count: int
    gpus: int
    shared: int
    per_gpu: int
    total: int
    max_concurrency: int

    def as_json(self) -> dict[str, Any]:
        """In bytes and requests."""
        return asdict(self)


def instances_of(evaluation: Evaluation) -> Instances | None:
    """The memory of all instances; None if only one is served, or if its memory or its ranks' GPUs are unknown."""
    memory, groups = evaluation.memory, evaluation.request.serving.instances
    if memory is None or len(groups) < 2:
        return None
    parallel = memory.parallel
    if any(len(group) != parallel.world_size for group in groups):
        return None
    ranks: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for group in groups:
        for rank, gpu in enumerate(group):
            ranks[gpu] += 1
            held[gpu] += memory.stages[rank // parallel.tp].total
    return Instances(
        count=len(groups),
        gpus=len(ranks),
        shared=max(ranks.values()),
        per_gpu=max(held.values()),
        total=held.total(),
        max_concurrency=len(groups) * (evaluation.full_length_requests or 0),
    )


def instance_problems(evaluation: Evaluation) -> Iterator[Problem]:
    """The problem of a GPU whose memory is too small for the ranks of all instances that share it."""
    found, gpu = instances_of(evaluation), evaluation.request.gpu
    if found is not None and gpu is not None and found.shared > 1 and found.per_gpu > gpu.memory:
        message = (
            f"gpu_device_ids: {found.shared} ranks of {found.count} instances share a GPU and take "
            f"{found.per_gpu / 1e9:.1f} GB of the {gpu.memory / 1e9:.1f} GB of {gpu.name}"
        )
        yield Problem("serving", message, "Lower kv_cache_tokens, or give each instance GPUs of its own.")
