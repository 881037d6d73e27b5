"""Floor 1: reads and writes file formats defined by other software; makes no decisions."""
