"""Features of the recipe that TensorRT-LLM's LLM API has and TensorRT engines lack: speculation by EAGLE-3, MTP or
n-grams, and settings of its PyTorch backend."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from trtforge.core.config_model import Config
from trtforge.core.config_schema import narrowed

MoeBackend = Literal[
    "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
    "MEGAMOE_DEEPGEMM",
]  # fmt: skip
"""Values of `moe_config.backend` in any release; `formats/release_data/llmapi.json` has those of each."""

_MOST_REQUESTS = "Batch size above which requests are not speculated; default: no limit."


class Eagle3Feature(Config):
    """A network of one decoder layer drafts the tokens; its checkpoint is separate from the model's."""

    model: str = Field(description="EAGLE-3 network: hub id or directory; for backend torch a directory.")
    draft_tokens: int = Field(3, ge=1, description="Draft tokens per iteration.")
    max_requests: int | None = Field(None, ge=1, description=_MOST_REQUESTS)

    @property
    def most_drafted(self) -> int:
        """Tokens that the embedded engine drafts."""
        return self.draft_tokens

    @property
    def most_written(self) -> int:
        """See EagleFeature."""
        return self.draft_tokens - 1


class MtpFeature(Config):
    """The model's own multi-token prediction layers draft the tokens."""

    draft_tokens: int = Field(1, ge=1, description="Draft tokens per iteration.")
    max_requests: int | None = Field(None, ge=1, description=_MOST_REQUESTS)


class NgramFeature(Config):
    """Tokens that followed the last ones earlier in the same text are drafted; no model is needed."""

    draft_tokens: int = Field(3, ge=1, description="Maximum draft tokens per iteration.")
    matching: int = Field(2, ge=1, description="Maximum number of last tokens to search for.")
    max_requests: int | None = Field(None, ge=1, description=_MOST_REQUESTS)


class MoeFeature(Config):
    """How the PyTorch backend runs experts; expert parallelism is `parallel.ep`."""

    backend: MoeBackend | None = Field(None, description="Kernels of the experts; default: TensorRT-LLM's choice.")
    max_num_tokens: int | None = Field(
        None, ge=1, description="Maximum tokens of one call of these kernels; more are split into chunks."
    )


class AttentionDpFeature(Config):
    """Each GPU runs the attention of its own requests, with all heads, instead of its heads of all requests."""

    balance: bool = Field(False, description="Delay prompts so that all GPUs process prompts in the same iterations.")
    timeout_iters: int | None = Field(None, ge=0, description="Balancing: maximum iterations that a prompt waits.")
    batching_wait_iters: int | None = Field(
        None, ge=0, description="Balancing: iterations to wait for further prompts."
    )

    @model_validator(mode="after")
    def _used(self) -> Self:
        if not self.balance and (self.timeout_iters is not None or self.batching_wait_iters is not None):
            raise ValueError("timeout_iters and batching_wait_iters need balance: true")
        return self


class CudaGraphsFeature(Config):
    """Generation iterations of recorded batch sizes run as CUDA graphs. Unset sizes are TensorRT-LLM's."""

    enabled: bool = Field(True, description="Whether CUDA graphs are used.")
    batch_sizes: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="Batch sizes to record.",
        json_schema_extra=narrowed(uniqueItems=True, items={"type": "integer", "minimum": 1}),
    )
    max_batch_size: int | None = Field(None, ge=1, description="Largest batch size to record, instead of a list.")
    padding: bool | None = Field(None, description="Run other batch sizes padded to the next recorded one.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = self.batch_sizes
        if sizes is not None and (min(sizes) < 1 or len(set(sizes)) < len(sizes)):
            raise ValueError("batch_sizes must be distinct sizes of at least 1")
        if sizes is not None and self.max_batch_size is not None:
            raise ValueError("batch_sizes and max_batch_size exclude each other: one follows from the other")
        if not self.enabled and (sizes, self.max_batch_size, self.padding) != (None, None, None):
            raise ValueError("CUDA graphs are off (enabled: false), so they have no batch sizes")
        return self
