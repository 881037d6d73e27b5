"""model.yaml: the arguments of TensorRT-LLM's LLM API, for the releases that run checkpoints without an engine.

The keys are those of tensorrt_llm/llmapi/llm_args.py, whose models forbid unknown ones; which release has which key is
looked up in `release_data/llmapi.json`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.features import SpeculationMethod
from trtforge.core.llm_api_features import MoeBackend
from trtforge.core.plausible import require_plausible
from trtforge.core.recipe import DtypeChoice
from trtforge.core.serving import GuidedBackend
from trtforge.core.yaml_text import read_yaml
from trtforge.formats.releases import read_release_data

MODEL_FILE = "model.yaml"
SERVE_FILE = "trtllm_serve.yaml"
"""The same arguments for trtllm-serve, beside model.yaml in a repository."""
_OF_TRITON = ("model", "backend", "triton_config")
SchedulerName = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]


class KvCacheArgs(Config):
    """`kv_cache_config`: KvCacheConfig. None: not written, so TensorRT-LLM's default applies."""

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


class SpeculativeArgs(Config):
    """`speculative_config`: one of the *DecodingConfig classes; `speculation_row` names it for a release."""

    decoding_type: str | None = None
    max_draft_len: int | None = Field(None, ge=1)
    num_nextn_predict_layers: int | None = Field(None, ge=1)
    max_matching_ngram_size: int | None = Field(None, ge=1)
    max_concurrency: int | None = Field(None, ge=1)
    allow_advanced_sampling: bool | None = None
    speculative_model_dir: str | None = Field(None, description="Relative to the file's own directory.")
    speculative_model: str | None = Field(None, description="Relative to the file's own directory.")

    @property
    def draft_model(self) -> str | None:
        """The draft model's directory."""
        return self.speculative_model or self.speculative_model_dir

    @property
    def draft_tokens(self) -> int:
        """Draft tokens per iteration."""
        return self.num_nextn_predict_layers or self.max_draft_len or 0


class MoeArgs(Config):
    """`moe_config`: MoeConfig."""

    backend: MoeBackend | None = None
    max_num_tokens: int | None = Field(None, ge=1)


class AttentionDpArgs(Config):
    """`attention_dp_config`: AttentionDpConfig."""

    enable_balance: bool | None = None
    timeout_iters: int | None = Field(None, ge=0)
    batching_wait_iters: int | None = Field(None, ge=0)


class CudaGraphArgs(Config):
    """`cuda_graph_config`: CudaGraphConfig."""

    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int | None = Field(None, ge=1)
    enable_padding: bool | None = None


class TritonArgs(Config):
    """`triton_config`: read by NVIDIA's own llmapi model (triton_backend/all_models/llmapi); not an LLM argument."""

    max_batch_size: int = 0
    decoupled: bool = True
    cancellation_check_period_ms: int = 100


class LlmArgs(Config):
    """The arguments of `tensorrt_llm.LLM`. `model` is relative to the file's own directory."""

    model: str = "."
    backend: Literal["pytorch"] = "pytorch"
    trust_remote_code: Literal[False] = False
    dtype: DtypeChoice | None = None
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: int = Field(1, ge=1)
    context_parallel_size: int | None = Field(None, ge=1)
    moe_tensor_parallel_size: int | None = Field(None, ge=1)
    moe_expert_parallel_size: int | None = Field(None, ge=1)
    enable_attention_dp: bool | None = None
    max_batch_size: int | None = Field(None, ge=1)
    max_input_len: int | None = Field(None, ge=1)
    max_seq_len: int | None = Field(None, ge=2)
    max_num_tokens: int | None = Field(None, ge=1)
    max_beam_width: int | None = Field(None, ge=1)
    enable_chunked_prefill: bool | None = None
    guided_decoding_backend: GuidedBackend | None = None
    gather_generation_logits: bool | None = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    enable_trtllm_sampler: bool | None = None
    enable_mixed_sampler: bool | None = None
    enable_lora: bool | None = None
    lora_config: LoraArgs = LoraArgs()
    kv_cache_config: KvCacheArgs = KvCacheArgs()
    scheduler_config: SchedulerArgs = SchedulerArgs()
    peft_cache_config: PeftCacheArgs = PeftCacheArgs()
    speculative_config: SpeculativeArgs = SpeculativeArgs()
    moe_config: MoeArgs = MoeArgs()
    attention_dp_config: AttentionDpArgs = AttentionDpArgs()
    cuda_graph_config: CudaGraphArgs | None = Field(CudaGraphArgs(), description="null: no CUDA graphs.")
    triton_config: TritonArgs | None = None

    @property
    def world_size(self) -> int:
        """Number of processes that the LLM API starts, one GPU each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * (self.context_parallel_size or 1)

    def to_json(self) -> dict[str, Any]:
        """The object of model.yaml: without unset keys, except `cuda_graph_config`, whose null turns graphs off."""
        values = self.model_dump(mode="json", exclude_none=True)
        written = {key: value for key, value in values.items() if value != {}}
        return written if self.cuda_graph_config is not None else {**written, "cuda_graph_config": None}

    def to_yaml(self) -> str:
        """The exact text of model.yaml."""
        return yaml.safe_dump(self.to_json(), sort_keys=False)

    def to_serve_yaml(self, directory: str) -> str:
        """The exact text of trtllm_serve.yaml: without options of its command line, paths below `directory`."""
        values = {key: value for key, value in self.to_json().items() if key not in _OF_TRITON}
        speculation = values.get("speculative_config", {})
        for key in ("speculative_model", "speculative_model_dir"):
            if key in speculation:
                speculation[key] = f"{directory}/{speculation[key]}"
        return yaml.safe_dump(values, sort_keys=False)

    def with_values(self, values: Mapping[str, Any], where: str, name: Callable[[str], str] = str) -> "LlmArgs":
        """A copy with these dotted keys set. Raises ForgeError for an invalid value, naming `where` and the key by
        `name`."""
        merged: dict[str, Any] = self.model_dump()
        for key, value in values.items():
            *parents, last = key.split(".")
            inner = merged
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
        return LlmArgs.parse(merged, where, name)


def read_llm_args(directory: Path) -> LlmArgs:
    """The model.yaml of `directory`. Raises ForgeError if it is missing, damaged or has an unknown key."""
    path = directory / MODEL_FILE
    again = "Make the directory again."
    values = read_yaml(path, hint=again, absent="Give what `trtforge compile --backend llmapi` wrote.")
    if not isinstance(values, dict):
        raise ForgeError(f"{path}: not a mapping of keys to values", hint=again)
    require_plausible(values, str(path), again)
    return LlmArgs.parse(values, str(path))


def require_llm_api(version: str, args: LlmArgs) -> None:
    """Raises ForgeError for a release whose LLM API is unknown, and for an argument or value that it lacks."""
    lines, line = _lines(), _line(version)
    known = {entry["key"]: entry for entry in read_release_data("llmapi")["arguments"]}
    for key, value in _dotted(args.to_json()):
        entry = known[key]
        if not _within(lines, line, entry):
            later = lines.index(line) < lines.index(entry["since"])
            raise ForgeError(
                f"TensorRT-LLM {version} has no LLM argument {key}",
                hint=f"It was added in {entry['since']}; leave it out." if later else "Leave it out.",
            )
        taken = entry.get("values", {}).get(line)
        if taken is not None and value not in taken:
            raise ForgeError(
                f"TensorRT-LLM {version}: {key} cannot be {value}", hint=f"It takes {', '.join(map(str, taken))}."
            )


@dataclass(frozen=True)
class SpeculationRow:
    """A release's names for a method of speculation. `model`: the key of its draft model; `tokens`: of its length."""

    decoding_type: str
    config_class: str
    model: str | None
    tokens: str


def speculation_row(version: str, method: SpeculationMethod) -> SpeculationRow | None:
    """The names of a method in a release's LLM API; None if it lacks it. Raises ForgeError for an unknown release."""
    lines, line = _lines(), _line(version)
    for entry in read_release_data("llmapi")["speculation"]:
        if entry["method"] == method and _within(lines, line, entry):
            return SpeculationRow(entry["decoding_type"], entry["class"], entry["model"], entry["tokens"])
    return None


def has_argument(version: str, key: str) -> bool:
    """Whether this release's LLM API has an argument. Raises ForgeError for an unknown release."""
    lines, line = _lines(), _line(version)
    entries = read_release_data("llmapi")["arguments"]
    return any(entry["key"] == key and _within(lines, line, entry) for entry in entries)


def _lines() -> list[str]:
    lines: list[str] = read_release_data("llmapi")["lines"]
    return lines


def _line(version: str) -> str:
    line, lines = ".".join(version.split(".")[:2]), _lines()
    if line not in lines:
        raise ForgeError(
            f"TensorRT-LLM {version}: its LLM API is not known", hint=f"Known releases: {'.x, '.join(lines)}.x."
        )
    return line


_UNSERVED = ("W8A8_SQ_PER_CHANNEL",)
"""Algorithms of ModelOpt's exports without a linear layer in TensorRT-LLM's PyTorch backend (`get_quant_method` in
tensorrt_llm/_torch/modules/linear.py, 1.2)."""


def is_served(algorithm: str | None) -> bool:
    """Whether the PyTorch backend supports an algorithm that trtforge reads in Hugging Face checkpoints."""
    return algorithm not in _UNSERVED


def require_served(algorithm: str | None) -> None:
    """Raises ForgeError for an algorithm of a Hugging Face checkpoint that no release's PyTorch backend supports."""
    if not is_served(algorithm):
        raise ForgeError(
            f"TensorRT-LLM's PyTorch backend has no layers for {algorithm}",
            hint="Convert the checkpoint and use engine.backend tensorrt_llm or torch.",
        )


def require_mixed_precision(version: str, algorithms: Collection[str]) -> None:
    """Raises ForgeError for an algorithm that a release's PyTorch backend does not support for single layers."""
    data, line = read_release_data("llmapi"), ".".join(version.split(".")[:2])
    known = {entry["quant_algo"]: entry for entry in data["mixed_precision"]}
    for algorithm in sorted(algorithms):
        if algorithm not in known or line not in data["lines"] or not _within(data["lines"], line, known[algorithm]):
            raise ForgeError(
                f"TensorRT-LLM {version} is not known to run single layers in {algorithm}",
                hint="Leave quantization.budget out, compile an already quantised Hugging Face checkpoint itself, or "
                "use another engine.target.tensorrt_llm.",
            )


def reads_quant_method(version: str, method: str) -> bool:
    """Whether a release's PyTorch backend reads a checkpoint with this `quant_method` in config.json alone."""
    entries, line = read_release_data("llmapi")["quant_methods"], _line(version)
    return any(entry["quant_method"] == method and _within(_lines(), line, entry) for entry in entries)


def at_least(version: str, line: str) -> bool:
    """Whether a release belongs to this line of releases or a later one; an unknown release counts as later."""
    lines, own = _lines(), ".".join(version.split(".")[:2])
    return own not in lines or lines.index(own) >= lines.index(line)


def network_since(architecture: str) -> str | None:
    """The first line of releases whose PyTorch backend has this architecture; None if unknown.

    Raises ForgeError for an architecture that no release has.
    """
    data = read_release_data("llmapi")
    for entry in data["networks"]:
        if entry["architecture"] == architecture:
            if entry["since"] is None:
                raise ForgeError(
                    f"TensorRT-LLM's PyTorch backend has no network for {architecture}",
                    hint="Use engine.backend tensorrt_llm or torch.",
                )
            since: str = entry["since"]
            return since
    return None


def applies_windows(architecture: str, version: str) -> bool:
    """Whether a release's PyTorch backend applies the sliding windows of this Hugging Face architecture."""
    data = read_release_data("llmapi")
    line = ".".join(version.split(".")[:2])
    return any(
        entry["architecture"] == architecture and line in data["lines"] and _within(data["lines"], line, entry)
        for entry in data["windowed_networks"]
    )


def _dotted(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == "triton_config":
            continue
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def _within(lines: list[str], line: str, entry: Mapping[str, Any]) -> bool:
    last = entry["until"] or lines[-1]
    return lines.index(entry["since"]) <= lines.index(line) <= lines.index(last)
