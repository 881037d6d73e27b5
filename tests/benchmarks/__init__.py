"""The README's claims, measured: `make bench`. Nothing here is collected by pytest, nothing asserts a time."""
