"""Floor 1: memory, control groups, processes, processors and GPUs of the machine. Only this package reads them."""
