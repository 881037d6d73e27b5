"""Floor 5: a recipe as ordered stages, and what is judged, reported and locked around them."""
