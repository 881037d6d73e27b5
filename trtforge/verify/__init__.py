"""Stage: checks that the split, quantised rank files compute the same as the Hugging Face model."""
