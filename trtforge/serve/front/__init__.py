"""The bounded HTTP server before Triton's own: limits, open endpoints, API keys. A process of its own."""
