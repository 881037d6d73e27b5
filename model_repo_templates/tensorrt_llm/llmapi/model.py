"""TensorRT-LLM's LLM API behind the interface of its engines: clients see no difference."""

import json
from collections.abc import Sequence
from pathlib import Path

from engine_process_model import EngineProcessModel
from model_config import ModelConfig


class TritonPythonModel(EngineProcessModel):
    """The Python model that Triton loads."""

    def command(self, config: ModelConfig, socket: Path) -> Sequence[str]:
        """Run the LLM that model.yaml describes."""
        seconds = config.text("max_queue_seconds")
        job = {
            "model_yaml": str(config.directory / "model.yaml"),
            "socket": str(socket),
            "max_running": config.max_batch_size,
            "max_queue_size": config.integer("max_queue_size", 2048),
            "max_queue_seconds": float(seconds) if seconds else None,
        }
        return (str(config.directory / "llmapi_engine.py"), json.dumps(job))
