"""The front: an HTTP server in its own process, before Triton's own, with limits, restricted endpoints and API keys."""
