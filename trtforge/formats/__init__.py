"""Floor 1: files as others define them. Reading and writing, no decisions."""
