"""The embedded engine: TensorRT-LLM checkpoints executed in plain torch, paged and batched in flight."""
