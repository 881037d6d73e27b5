"""Linear layers by number format: kernels, packing and the tensors of rank files."""
