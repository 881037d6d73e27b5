"""Programs that run in TensorRT-LLM's environment: single files that import nothing of trtforge."""
