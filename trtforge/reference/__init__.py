"""The Hugging Face model as `transformers` computes it, one decoder layer at a time."""
