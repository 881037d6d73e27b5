"""The ranks of a model: processes or threads, their communication, and the directory that they load."""
