"""The embedded engine: TensorRT-LLM checkpoints executed in plain torch, paged and batched in flight."""

import os

# Threads of a parallel operation wait asleep, not spinning, for the last of them. Otherwise each operation of a step
# lasts until the scheduler takes the spinning threads off a core that another process keeps busy: measured, steps
# become ten times as long. OpenMP reads this when torch is loaded, so it is set before any module here imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
