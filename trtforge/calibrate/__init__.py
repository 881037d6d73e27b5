"""Stage: the activation statistics that quantised formats need, measured once on the unsplit model."""
