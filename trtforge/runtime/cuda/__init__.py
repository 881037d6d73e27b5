"""What only a CUDA GPU computes: kernels in Triton's language and graphs of a step."""
