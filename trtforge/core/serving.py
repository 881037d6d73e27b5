"""How Triton serves an engine, in the recipe: settings of every backend, and those of TensorRT-LLM's executor."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from trtforge.core.config_model import Config
from trtforge.core.config_schema import also
from trtforge.core.sizes import MOST_INT32, Bytes

GuidedBackend = Literal["xgrammar", "llguidance"]
SchedulerPolicy = Literal["guaranteed_no_evict", "max_utilization"]
_GROUP = r"^[0-9]+(,[0-9]+)*$"
_INSTANCES = r"^[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*$"
_DIGITS = len(str(MOST_INT32))  # Python refuses to read numbers of thousands of digits

_OR_ONE_ID = also({"type": "integer", "minimum": 0, "maximum": MOST_INT32})
_WINDOW = {"type": "integer", "minimum": 1, "maximum": MOST_INT32}
_Window = Annotated[int, WithJsonSchema(_WINDOW)]


class ServingConfig(Config):
    """How Triton serves the engine. From `max_attention_window_size` on: unset settings are TensorRT-LLM's defaults."""

    streaming: bool = Field(True, description="Decoupled responses: tokens are sent as they are generated.")
    scheduler: SchedulerPolicy = Field("guaranteed_no_evict", description="When a waiting request may start.")
    kv_cache_fraction: float = Field(0.9, gt=0, le=1, description="Fraction of the free memory for the KV cache.")
    kv_cache_tokens: int | None = Field(None, ge=1, description="Maximum tokens in the KV cache.")
    max_batch_size: int | None = Field(
        None, ge=1, description="Maximum number of requests in flight, below the engine's; null: the engine's."
    )
    max_num_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens per iteration, below the engine's; null: the engine's."
    )
    max_queue_size: int = Field(
        2048, ge=0, description="Maximum number of waiting requests; more are refused at once. 0 means 2048."
    )
    max_queue_seconds: float | None = Field(
        None, gt=0, description="Maximum waiting time of a request before it is refused; null means no limit."
    )
    exclude_input_in_output: bool = Field(True, description="Return the output without the prompt.")
    draft_engine: str | None = Field(
        None, min_length=1, description="Engine of a draft model, of the same backend; not for the LLM API."
    )
    draft_gpu_device_ids: str | None = Field(
        None,
        pattern=_GROUP,
        description="GPUs of the draft engine's ranks; null: the first ones.",
        json_schema_extra=_OR_ONE_ID,
    )
    max_attention_window_size: tuple[_Window, ...] | None = Field(
        None,
        min_length=1,
        description="Attention window in tokens, one value or one per layer; null: the model's own.",
        json_schema_extra=also(_WINDOW),
    )
    sink_token_length: int | None = Field(
        None, ge=0, le=MOST_INT32, description="First tokens that stay in every attention window (StreamingLLM)."
    )
    kv_cache_host_memory_bytes: Bytes | None = Field(
        None, description="Host memory of each rank for KV blocks that leave the GPU, such as 16GB; needs kv_reuse."
    )
    cuda_graph_mode: bool | None = Field(None, description="Run generation steps as CUDA graphs.")
    cuda_graph_cache_size: int | None = Field(
        None, ge=0, le=MOST_INT32, description="Maximum number of CUDA graphs kept."
    )
    enable_trt_overlap: bool | None = Field(None, description="Overlap TensorRT steps with CUDA graphs; experimental.")
    normalize_log_probs: bool | None = Field(None, description="Normalise the log probabilities of beams by length.")
    lora_prefetch_dir: str | None = Field(
        None, min_length=1, description="Directory on the server whose LoRA adapters are loaded at the start."
    )
    guided_decoding_backend: GuidedBackend | None = Field(
        None,
        description="Requests may give a JSON schema, a regular expression or a grammar; llguidance: LLM API only.",
    )
    gpu_device_ids: str | None = Field(
        None,
        pattern=_INSTANCES,
        description='GPUs of the ranks; ";" separates instances of the model: "0,1;2,3".',
        json_schema_extra=_OR_ONE_ID,
    )
    participant_ids: str | None = Field(
        None,
        pattern=_INSTANCES,
        description="MPI ranks of each instance; rank 0 is the orchestrator.",
        json_schema_extra=_OR_ONE_ID,
    )
    num_nodes: int | None = Field(None, ge=1, le=MOST_INT32, description="Number of MPI nodes.")
    speculative_decoding_fast_logits: bool | None = Field(
        None, description="Send draft logits from engine to engine without the client; needs participant_ids."
    )

    @field_validator("gpu_device_ids", "participant_ids", "draft_gpu_device_ids", mode="before")
    @classmethod
    def _one_id(cls, value: Any) -> Any:
        """Accept a single id, which is a number in YAML."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("gpu_device_ids", "participant_ids", "draft_gpu_device_ids")
    @classmethod
    def _ids_of_32_bits(cls, value: str | None) -> str | None:
        numbers = () if value is None else re.split("[,;]", value)
        if any(len(each.lstrip("0")) > _DIGITS or int(each) > MOST_INT32 for each in numbers):
            raise ValueError(f"an id is at most {MOST_INT32:,}")
        return value

    @field_validator("max_attention_window_size", mode="before")
    @classmethod
    def _one_window(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("max_attention_window_size")
    @classmethod
    def _windows_of_32_bits(cls, windows: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if windows is not None and min(windows) < 1:
            raise ValueError("an attention window has at least one token")
        if windows is not None and max(windows) > MOST_INT32:
            raise ValueError(f"an attention window has at most {MOST_INT32:,} tokens")
        return windows

    @property
    def lowered_limits(self) -> dict[str, int]:
        """The engine's limits that these settings lower."""
        limits = {"max_batch_size": self.max_batch_size, "max_num_tokens": self.max_num_tokens}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def executor_settings(self) -> dict[str, Any]:
        """The TensorRT-LLM settings that are set, by their names in config.pbtxt."""
        names = tuple(type(self).model_fields)
        own = names[names.index("max_attention_window_size") :]
        return {name: value for name in own if (value := getattr(self, name)) is not None}

    @property
    def instances(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each instance of the model; empty if they are not chosen."""
        return _groups(self.gpu_device_ids)

    @property
    def draft_gpus(self) -> tuple[int, ...]:
        """The GPUs of the draft engine's ranks; empty if they are not chosen."""
        return _groups(self.draft_gpu_device_ids)[0] if self.draft_gpu_device_ids else ()

    @property
    def participants(self) -> tuple[tuple[int, ...], ...]:
        """The MPI ranks of each instance of the model; empty if they are not chosen."""
        return _groups(self.participant_ids)


def _groups(ids: str | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group.split(","))) for group in ids.split(";")) if ids else ()
