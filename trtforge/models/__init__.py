"""Floor 2: model families as tables, and the one interpreter that turns a table into tensors."""
