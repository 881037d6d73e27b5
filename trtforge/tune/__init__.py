"""Floor 5: finds the best serving settings and load for a goal by measuring servers on this machine."""
