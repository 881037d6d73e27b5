"""Floor 1: file formats that others define: reading and writing, no decisions."""
