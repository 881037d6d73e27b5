"""Stage: proof that the split, quantised rank files compute what the Hugging Face model computes."""
