"""Stage: converts a Hugging Face checkpoint (and a calibration) to a TensorRT-LLM checkpoint for one layout."""
