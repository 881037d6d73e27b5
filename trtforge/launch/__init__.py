"""The command lines of Triton servers, which `serve` starts and `deploy` writes."""
