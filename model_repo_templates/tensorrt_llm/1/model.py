"""The embedded engine behind TensorRT-LLM's interface."""

import json
from collections.abc import Sequence
from pathlib import Path

from engine_process_model import EngineProcessModel
from model_config import ModelConfig

PROGRAM = ("-m", "trtforge.runtime.hosted")


class TritonPythonModel(EngineProcessModel):
    """The Python model that Triton loads."""

    def command(self, config: ModelConfig, socket: Path) -> Sequence[str]:
        """Run the embedded engine."""
        tokens = config.text("max_tokens_in_paged_kv_cache")
        seconds = config.text("max_queue_seconds")
        job = {
            "engine": str(config.directory / config.text("gpt_model_path")),
            "socket": str(socket),
            "model": config.name,
            "drafts": config.flag("drafts", False),
            "scheduler": config.text("batch_scheduler_policy", "guaranteed_no_evict"),
            "kv_cache_fraction": float(config.text("kv_cache_free_gpu_mem_fraction", "0.9")),
            "kv_cache_tokens": int(tokens) if tokens else None,
            "kv_cache_host_memory_bytes": config.integer("kv_cache_host_memory_bytes", 0),
            "max_batch_size": config.integer("max_batch_size", 0) or None,
            "max_num_tokens": config.integer("max_num_tokens", 0) or None,
            "kv_reuse": config.flag("enable_kv_cache_reuse", True),
            "chunked_context": config.flag("enable_chunked_context", False),
            "max_queue_size": config.integer("max_queue_size", 2048),
            "max_queue_seconds": float(seconds) if seconds else None,
        }
        return (*PROGRAM, json.dumps(job))
