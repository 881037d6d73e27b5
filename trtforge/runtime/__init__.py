"""The embedded engine: TensorRT-LLM checkpoints in plain torch, with paged KV cache and in-flight batching."""

from trtforge.core.threads import wait_briefly

# Must run before torch is imported, also in Triton's Python process, where no trtforge command has run.
wait_briefly()
