"""One file per family: its table, or its differences from the family that it builds on."""
