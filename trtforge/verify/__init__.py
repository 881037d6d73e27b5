"""Stage: checks that the split, quantised rank files compute what the Hugging Face model computes."""
