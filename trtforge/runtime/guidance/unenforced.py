"""What of a guide xgrammar would pass over without a word, and so is refused."""


class Unenforced(Exception):
    """A part of a guide that outputs would not keep to. `args[0]`: what, and where in the guide."""


class Unsatisfiable(Unenforced):
    """A schema that no value fits."""
