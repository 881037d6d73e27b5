"""Floor 1: memory, control groups, processes, processors and GPUs of the machine. No other module reads them."""
