"""The embedded engine for Python programs: `from trtforge import Engine`. See docs/python.md."""
