"""TensorRT-LLM's LLM API behind the interface of its engines: clients see no difference."""

import yaml
from engine_model import EngineModel, RequestEngine
from llm_engine import LlmEngine
from model_config import ModelConfig

from trtforge.core.errors import ForgeError


class TritonPythonModel(EngineModel):
    """The Python model that Triton loads."""

    def load(self, config: ModelConfig) -> RequestEngine:
        """The LLM that model.yaml describes; the paths in it are relative to it."""
        path = config.directory / "model.yaml"
        try:
            arguments = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ForgeError(f"{path}: not readable: {error}", hint="Package the engine again.") from None
        arguments.pop("triton_config", None)
        arguments["model"] = str(config.directory / arguments["model"])
        return LlmEngine(arguments)
