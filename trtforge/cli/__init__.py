"""Floor 6: the command line. A command parses, calls one function of the floors below, and shows the result."""
