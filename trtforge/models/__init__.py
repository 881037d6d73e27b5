"""Floor 2: model families as tables, and the code that expands a table into tensors."""
