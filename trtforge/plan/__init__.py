"""Floor 3: what can be known from metadata before any work starts."""
