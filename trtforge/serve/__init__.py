"""Serving a repository with the Triton server, probing it and calling it."""
