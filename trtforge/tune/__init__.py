"""Floor 5: which serving settings and which load are best for a goal, by measuring servers on this machine."""
