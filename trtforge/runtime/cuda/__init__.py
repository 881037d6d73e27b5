"""Code for CUDA GPUs only: Triton kernels, and CUDA graphs of a step."""
