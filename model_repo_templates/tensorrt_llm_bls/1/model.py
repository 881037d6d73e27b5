"""Text in, text out, with stop words compared as text too (a parameter of config.pbtxt); see text_model."""

from text_model import TextModel


class TritonPythonModel(TextModel):
    """The name that Triton looks for."""
