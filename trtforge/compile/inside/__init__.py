"""What runs beside TensorRT-LLM: programs of one file that import nothing of trtforge, so containers can run them."""
