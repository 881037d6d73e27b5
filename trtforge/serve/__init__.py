"""Serve a repository with the Triton server, probe it and send it requests."""
