"""Floor 5: finds from its metrics what limits a running server and what to change."""
