"""The front: an HTTP server before Triton's own with limits, restricted endpoints and API keys, in its own process."""
