"""Stage: a Hugging Face checkpoint (and a calibration) becomes a TensorRT-LLM checkpoint for one parallel layout."""
