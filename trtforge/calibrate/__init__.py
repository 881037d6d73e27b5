"""Stage: what the quantised formats need to know of a model's activations, measured once for the unsplit model."""
