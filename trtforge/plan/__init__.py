"""Floor 3: plans from metadata alone, before any work starts."""
