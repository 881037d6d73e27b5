"""Floor 0: shared by every other package; imports none of them."""
