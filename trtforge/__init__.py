"""trtforge: a Hugging Face checkpoint in, a verified Triton model repository for TensorRT-LLM out."""

__version__ = "0.1.0"
