"""Floor 0: what every other part may use and what uses nothing of trtforge itself."""
