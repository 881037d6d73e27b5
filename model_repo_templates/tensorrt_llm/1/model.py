"""The embedded engine behind TensorRT-LLM's interface."""

from collections.abc import Mapping

from engine_health import EngineHealth
from engine_metrics import EngineMetrics
from engine_model import EngineModel, RequestEngine
from model_config import ModelConfig

from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.requests import Output


class TritonPythonModel(EngineModel):
    """The Python model that Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine and start the threads."""
        super().initialize(args)
        period = self._config.integer("stats_check_period_ms", 100)
        self._health.start(period)
        self._metrics = EngineMetrics(self._embedded, self._config.name, args["model_version"])
        self._metrics.start(period)

    def load(self, config: ModelConfig) -> RequestEngine:
        """The embedded engine."""
        self._embedded = Engine.load(config.directory / config.text("gpt_model_path"), _options(config))
        self._health = EngineHealth(self._embedded)
        return self._embedded

    def heard(self, output: Output) -> None:
        """An engine that cannot go on ends its process."""
        self._health.heard(output)


def _options(config: ModelConfig) -> EngineOptions:
    tokens = config.text("max_tokens_in_paged_kv_cache")
    return EngineOptions(
        scheduler=config.text("batch_scheduler_policy", "guaranteed_no_evict"),
        kv_cache_fraction=float(config.text("kv_cache_free_gpu_mem_fraction", "0.9")),
        kv_cache_tokens=int(tokens) if tokens else None,
        kv_reuse=config.flag("enable_kv_cache_reuse", True),
        chunked_context=config.flag("enable_chunked_context", False),
    )
