"""Floor 5: what limits a running server, and what to change, from its metrics."""
