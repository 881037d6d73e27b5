"""The embedded engine: TensorRT-LLM checkpoints executed in plain torch, paged and batched in flight."""

from trtforge.core.threads import wait_briefly

# Before any module here imports torch: also in Triton's Python process, which no command of ours started.
wait_briefly()
