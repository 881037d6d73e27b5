"""Text in, text out; see text_model."""

from text_model import TextModel


class TritonPythonModel(TextModel):
    """The name that Triton looks for."""
