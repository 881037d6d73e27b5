"""The package stage: an engine and a tokenizer become a Triton model repository."""
