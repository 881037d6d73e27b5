"""Text in, text out; see text_model."""

from collections.abc import Mapping

from drafted_served import connected_process
from model_config import ModelConfig
from text_engine import TextEngine
from text_model import TextModel


class TritonPythonModel(TextModel):
    """The Python model that Triton loads."""

    def connect(self, config: ModelConfig, names: Mapping[str, str]) -> TextEngine:
        """Connect to the engine process that the engine model starts."""
        return connected_process(config, names)
