"""Text in, text out, with an engine model that Triton itself runs; see text_model."""

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
