"""model.yaml: the arguments of TensorRT-LLM's LLM API, for the releases that run checkpoints without an engine.

The keys are those of tensorrt_llm/llmapi/llm_args.py, whose models forbid unknown ones; which release has which key is
looked up in `release_data/llmapi.json`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.plausible import require_plausible
from trtforge.core.recipe import DtypeChoice
from trtforge.core.yaml_text import read_yaml
from trtforge.formats.releases import read_release_data

MODEL_FILE = "model.yaml"
SchedulerName = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]


class KvCacheArgs(Config):
    """`kv_cache_config`: KvCacheConfig. None: not written, so TensorRT-LLM's default."""

    enable_block_reuse: bool | None = None
    free_gpu_memory_fraction: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_attention_window: tuple[int, ...] | None = None
    sink_token_length: int | None = None
    host_cache_size: int | None = Field(None, ge=0, description="Bytes.")
    dtype: Literal["auto", "fp8"] | None = None
    tokens_per_block: int | None = Field(None, ge=2)


class SchedulerArgs(Config):
    """`scheduler_config`: SchedulerConfig."""

    capacity_scheduler_policy: SchedulerName | None = None


class LoraArgs(Config):
    """`lora_config`: LoraConfig."""

    lora_dir: tuple[str, ...] | None = None
    max_lora_rank: int | None = Field(None, ge=1)
    lora_target_modules: tuple[str, ...] | None = None


class PeftCacheArgs(Config):
    """`peft_cache_config`: PeftCacheConfig. `host_cache_size` is in bytes."""

    optimal_adapter_size: int | None = None
    max_adapter_size: int | None = None
    device_cache_percent: float | None = Field(None, ge=0, le=1)
    host_cache_size: int | None = Field(None, ge=0)


class TritonArgs(Config):
    """`triton_config`: what NVIDIA's own llmapi model (triton_backend/all_models/llmapi) reads; not an LLM argument."""

    max_batch_size: int = 0
    decoupled: bool = True
    cancellation_check_period_ms: int = 100


class LlmArgs(Config):
    """The arguments of `tensorrt_llm.LLM`. `model` is relative to the file's own directory."""

    model: str = "."
    backend: Literal["pytorch"] = "pytorch"
    dtype: DtypeChoice | None = None
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    context_parallel_size: int | None = Field(None, ge=1)
    moe_tensor_parallel_size: int | None = Field(None, ge=1)
    moe_expert_parallel_size: int | None = Field(None, ge=1)
    max_batch_size: int | None = Field(None, ge=1)
    max_input_len: int | None = Field(None, ge=1)
    max_seq_len: int | None = Field(None, ge=2)
    max_num_tokens: int | None = Field(None, ge=1)
    max_beam_width: int | None = Field(None, ge=1)
    enable_chunked_prefill: bool | None = None
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    gather_generation_logits: bool | None = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    enable_lora: bool | None = None
    lora_config: LoraArgs = LoraArgs()
    kv_cache_config: KvCacheArgs = KvCacheArgs()
    scheduler_config: SchedulerArgs = SchedulerArgs()
    peft_cache_config: PeftCacheArgs = PeftCacheArgs()
    triton_config: TritonArgs | None = None

    @property
    def world_size(self) -> int:
        """Processes that the LLM API starts, a GPU each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * (self.context_parallel_size or 1)

    def to_json(self) -> dict[str, Any]:
        """What is written: no unset key, no empty object."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {key: value for key, value in values.items() if value != {}}

    def to_yaml(self) -> str:
        """The exact text of model.yaml."""
        return yaml.safe_dump(self.to_json(), sort_keys=False)

    def with_values(self, values: Mapping[str, Any], where: str) -> "LlmArgs":
        """A copy with these dotted keys set. Raises ForgeError naming `where` for an invalid value."""
        merged: dict[str, Any] = self.model_dump()
        for key, value in values.items():
            *parents, last = key.split(".")
            inner = merged
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
        return LlmArgs.parse(merged, where)


def read_llm_args(directory: Path) -> LlmArgs:
    """The model.yaml of `directory`. Raises ForgeError if it is missing, damaged or has a key that is not known."""
    path = directory / MODEL_FILE
    again = "Make the directory again."
    values = read_yaml(path, hint=again, absent="Give what `trtforge compile --backend llmapi` wrote.")
    if not isinstance(values, dict):
        raise ForgeError(f"{path}: not a mapping of keys to values", hint=again)
    require_plausible(values, str(path), again)
    return LlmArgs.parse(values, str(path))


def require_llm_api(version: str, args: LlmArgs) -> None:
    """Raises ForgeError for a release whose LLM API is not known, and for an argument that it does not have."""
    lines: list[str] = read_release_data("llmapi")["lines"]
    line = ".".join(version.split(".")[:2])
    if line not in lines:
        raise ForgeError(
            f"TensorRT-LLM {version}: its LLM API is not known", hint=f"Known releases: {'.x, '.join(lines)}.x."
        )
    known = {entry["key"]: entry for entry in read_release_data("llmapi")["arguments"]}
    for key in _dotted(args.to_json()):
        entry = known[key]
        if not _within(lines, line, entry):
            raise ForgeError(
                f"TensorRT-LLM {version} has no LLM argument {key}",
                hint=f"It was added in {entry['since']}; leave it out.",
            )


def applies_windows(architecture: str, version: str) -> bool:
    """Whether a release's PyTorch backend applies the sliding windows of this Hugging Face architecture."""
    data = read_release_data("llmapi")
    line = ".".join(version.split(".")[:2])
    return any(
        entry["architecture"] == architecture and line in data["lines"] and _within(data["lines"], line, entry)
        for entry in data["windowed_networks"]
    )


def _dotted(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key == "triton_config":
            continue
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key


def _within(lines: list[str], line: str, entry: Mapping[str, Any]) -> bool:
    last = entry["until"] or lines[-1]
    return lines.index(entry["since"]) <= lines.index(line) <= lines.index(last)
