"""Errors for parts of a guide that xgrammar would ignore silently; they are refused instead."""


class Unenforced(Exception):
    """A part of a guide that would not be enforced. `args[0]`: the part, and where it is in the guide."""


class Unsatisfiable(Unenforced):
    """A schema for which no value is valid."""
