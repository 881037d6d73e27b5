"""The decoder of one rank: layers, attention, KV cache and logits."""
