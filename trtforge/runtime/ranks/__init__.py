"""The ranks of a model: processes or threads, their exchanges, and where they load from."""
