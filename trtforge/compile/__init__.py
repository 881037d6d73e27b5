"""Stage: an engine for one backend from a checkpoint, with paged KV cache and in-flight batching on."""
