"""The command lines of Triton servers: what `serve` starts and `deploy` writes down."""
