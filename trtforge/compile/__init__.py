"""Stage: build an engine for one backend from a checkpoint, with a paged KV cache and in-flight batching."""
