"""Text in, text out, with stop words compared as text too; for an engine model that Triton itself runs."""

from collections.abc import Mapping

from drafted_engine import connected
from model_config import ModelConfig
from text_engine import TextEngine
from text_model import TextModel


class TritonPythonModel(TextModel):
    """The Python model that Triton loads."""

    def connect(self, config: ModelConfig, names: Mapping[str, str]) -> TextEngine:
        """Connect to the engine model of this server."""
        return connected(config)
