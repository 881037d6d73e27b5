"""Servers in the background: `trtforge serve --detach`, `trtforge status` and `trtforge stop`."""
