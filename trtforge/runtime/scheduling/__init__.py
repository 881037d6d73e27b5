"""Requests as sequences, KV blocks and the batch of each step."""
