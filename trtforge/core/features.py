"""Features of an engine in the recipe; build flags and runtime keys are both derived from them."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from trtforge.core.config_model import Config
from trtforge.core.config_schema import also, narrowed
from trtforge.core.llm_api_features import (
    AttentionDpFeature,
    CudaGraphsFeature,
    Eagle3Feature,
    MoeFeature,
    MtpFeature,
    NgramFeature,
)
from trtforge.core.sizes import Bytes

LoraModule = Literal[
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"
]  # fmt: skip
"""Linear layers that an adapter may change, by TensorRT-LLM's names (docs/source/advanced/lora.md)."""

SpeculationMethod = Literal["draft", "medusa", "eagle", "lookahead", "eagle3", "mtp", "ngram"]
SPECULATION: tuple[SpeculationMethod, ...] = ("draft", "medusa", "eagle", "lookahead", "eagle3", "mtp", "ngram")
OF_THE_LLM_API = ("eagle3", "mtp", "ngram", "moe", "attention_dp", "cuda_graphs")
"""Features that TensorRT engines lack."""
OF_ENGINES = (
    "medusa", "eagle", "lookahead", "multiple_profiles", "weights_on_gpu", "context_logits",
    "max_prompt_embedding_table_size",
)  # fmt: skip
"""Features that the LLM API lacks."""
EMBEDDED = frozenset(
    {"draft", "ngram", "lookahead", "eagle3", "lora", "context_logits", "generation_logits"}
    | {"max_prompt_embedding_table_size"}
)
"""Features of the embedded engine beyond KV reuse and chunked context."""

Choices = tuple[tuple[int, ...], ...]
"""A tree of draft tokens: for each node, the candidate ranks on the path to it."""
_PATH = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SWITCHED = also({"type": "boolean"})
MOST_NODES = 63
"""Nodes of a tree that the embedded engine can verify: a node's ancestors, with the token before the tree, are a mask
of 64 bits. TensorRT-LLM's default tree has as many nodes."""


class LoraFeature(Config):
    """Adapters that requests refer to by task id. Requests may also bring adapters, but not to the LLM API."""

    adapters: tuple[str, ...] = Field((), description="PEFT directories; they set max_rank and modules.")
    max_rank: int | None = Field(None, ge=1, description="Maximum rank; default: that of the adapters, else 64.")
    modules: tuple[LoraModule, ...] = Field(
        (), description="Layers with adapters; default: those of the adapters, else attn_q, attn_k, attn_v."
    )
    gpu_fraction: float = Field(
        0.05, gt=0, lt=1, description="Adapter cache: fraction of the memory that the KV cache leaves free."
    )
    host_memory: Bytes = Field(1 << 30, description="Adapter cache on the host of each rank, such as 16GB.")


class DraftFeature(Config):
    """The engine verifies tokens that a smaller model drafts.

    The embedded engine and the LLM API run both models. A TensorRT engine takes the tokens from the text models if it
    is packaged with `serving.draft_engine`, else from the client; an embedded engine does so without this feature.
    """

    model: str | None = Field(
        None, description="Draft model: hub id or directory. For engines only `trtforge plan` reads it."
    )
    engine: str | None = Field(
        None, description="Compiled engine of the draft model, which becomes part of the engine; backend torch only."
    )
    tokens: int = Field(5, ge=1, description="Maximum draft tokens per iteration.")


class _Tree(Config):
    draft_tokens: int | None = Field(
        None, ge=1, description="Maximum draft tokens per iteration; default: the checkpoint's."
    )
    choices: Choices | None = Field(
        None,
        description="Tree of candidates, such as [[0], [0, 0], [1]].",
        json_schema_extra=narrowed(minItems=1, uniqueItems=True, items=_PATH),
    )

    @field_validator("choices")
    @classmethod
    def _is_a_tree(cls, choices: Choices | None) -> Choices | None:
        """The C++ runtime requires every node, not only the leaves (docs/source/advanced/speculative-decoding.md)."""
        nodes = set(choices or ())
        if choices is not None and (not choices or () in nodes or len(nodes) < len(choices)):
            raise ValueError("choices must be distinct paths of at least one token")
        for path in choices or ():
            if min(path) < 0:
                raise ValueError(f"{list(path)} has a negative rank")
            if len(path) > 1 and path[:-1] not in nodes:
                raise ValueError(f"{list(path)} needs the path to it, {list(path[:-1])}")
        return choices

    @property
    def tree_depth(self) -> int | None:
        """Tokens of the longest path."""
        return max(map(len, self.choices)) if self.choices is not None else None


class MedusaFeature(_Tree):
    """Medusa heads draft the tokens: those of the checkpoint, or of a file beside the embedded engine."""

    model: str | None = Field(
        None,
        description="Directory with medusa_lm_head.safetensors: for a TensorRT engine it is converted with the model, "
        "with backend torch it becomes part of the engine.",
    )
    heads: int | None = Field(None, ge=1, description="Medusa heads; default: the checkpoint's.")
    layers: int | None = Field(None, ge=1, description="Residual layers per head; default: the checkpoint's.")

    @property
    def used_heads(self) -> int:
        """Number of heads that the embedded engine uses; TensorRT-LLM's converter has 4."""
        heads = self.heads or 4
        return self.tree_depth or min(heads, self.draft_tokens or heads)

    @property
    def most_drafted(self) -> int:
        """The most tokens that the embedded engine drafts: without a tree, one per head."""
        return len(self.choices or ()) or self.used_heads


class EagleFeature(_Tree):
    """An extra decoder layer drafts the tokens: that of the checkpoint, or of files beside the embedded engine."""

    model: str | None = Field(
        None,
        description="Directory of an EAGLE network: for a TensorRT engine it is converted with the model, with backend "
        "torch it becomes part of the engine.",
    )
    depth: int | None = Field(
        None, ge=1, description="Runs of the draft network per iteration; default: the checkpoint's."
    )

    @property
    def most_drafted(self) -> int:
        """The most tokens that the embedded engine drafts: without a tree, one per run; TensorRT-LLM's converter: 4."""
        return len(self.choices or ()) or self.draft_tokens or self.depth or 4

    @property
    def most_written(self) -> int:
        """Draft tokens for which the network computes keys and values, to draft the tokens after them."""
        return len({path[:-1] for path in self.choices} - {()}) if self.choices else self.most_drafted - 1


Drafting = MedusaFeature | EagleFeature
"""Drafters that can become part of a checkpoint."""


class LookaheadFeature(Config):
    """The model drafts its own tokens: n-grams of a window, and candidates from earlier ones. No training needed."""

    window: int = Field(4, ge=1, description="Lookahead window: n-grams generated in parallel.")
    ngram: int = Field(3, ge=2, description="Tokens per n-gram, the maximum accepted per iteration.")
    verification: int = Field(4, ge=0, description="N-grams verified per iteration.")

    @model_validator(mode="after")
    def _is_legal(self) -> Self:
        """The check of `LookaheadDecodingConfig::isLegal`, cpp/tensorrt_llm/executor/decodingConfig.cpp; also requires
        draft tokens."""
        if self.draft_tokens == 0:
            raise ValueError("no tokens would be drafted: the minimum is window 2, ngram 2, verification 1")
        return self

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of one step: `calculateSpeculativeResourceTuple` in the same file."""
        return self.ngram - 2 + (self.window - 1 + self.verification) * (self.ngram - 1)


class FeaturesConfig(Config):
    """Features of the engine; build flags and runtime keys are derived from them."""

    kv_reuse: bool = Field(True, description="Share KV blocks between requests with the same prefix.")
    chunked_context: bool = Field(True, description="Split long prompts into chunks that fit max_num_tokens.")
    lora: LoraFeature | None = Field(None, description="Serve LoRA adapters.", json_schema_extra=_SWITCHED)
    draft: DraftFeature | None = Field(
        None, description="Verify tokens that a draft model proposes.", json_schema_extra=_SWITCHED
    )
    medusa: MedusaFeature | None = Field(None, description="Speculate with Medusa heads.", json_schema_extra=_SWITCHED)
    eagle: EagleFeature | None = Field(
        None, description="Speculate with an EAGLE network.", json_schema_extra=_SWITCHED
    )
    lookahead: LookaheadFeature | None = Field(
        None, description="Speculate without any other model.", json_schema_extra=_SWITCHED
    )
    eagle3: Eagle3Feature | None = Field(None, description="LLM API and torch: speculate with an EAGLE-3 network.")
    mtp: MtpFeature | None = Field(
        None, description="LLM API: speculate with the model's MTP layers.", json_schema_extra=_SWITCHED
    )
    ngram: NgramFeature | None = Field(
        None, description="LLM API and torch: speculate with n-grams of the text.", json_schema_extra=_SWITCHED
    )
    moe: MoeFeature | None = Field(None, description="LLM API: how experts run.")
    attention_dp: AttentionDpFeature | None = Field(
        None,
        description="LLM API: data parallelism for attention, tensor or expert parallelism for the rest.",
        json_schema_extra=_SWITCHED,
    )
    cuda_graphs: CudaGraphsFeature | None = Field(
        None,
        description="LLM API: CUDA graphs; false: none; default: TensorRT-LLM's sizes.",
        json_schema_extra=_SWITCHED,
    )
    multiple_profiles: bool = Field(
        False, description="Tune kernels for several iteration sizes: faster engine, much longer build."
    )
    weights_on_gpu: float = Field(
        1.0, ge=0, le=1, description="Fraction of the weights on the GPU; the others are streamed from host memory."
    )
    context_logits: bool = Field(False, description="Allow requests for the logits of the prompt.")
    generation_logits: bool = Field(False, description="Allow requests for the logits of the output.")
    max_prompt_embedding_table_size: int = Field(
        0,
        ge=0,
        description="Rows of prompt tables of all requests together; a request may have this / max_batch_size.",
    )

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _graphs(cls, value: Any) -> Any:
        """Accept `false` as a setting: TensorRT-LLM's default is on."""
        return {"enabled": value} if isinstance(value, bool) else value

    @field_validator("lora", "draft", "medusa", "eagle", "lookahead", "mtp", "ngram", "attention_dp", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """`lookahead: true` enables a feature with its defaults, `false` disables it."""
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_method(self) -> Self:
        methods = [name for name in SPECULATION if getattr(self, name) is not None]
        if len(methods) > 1:
            raise ValueError(f"{' and '.join(methods)}: an engine has only one speculative decoding method")
        return self

    @property
    def unsupported_by_torch(self) -> tuple[str, ...]:
        """The requested features that the embedded engine lacks."""
        with_files = {"medusa": self.medusa, "eagle": self.eagle}
        own = EMBEDDED | {name for name, each in with_files.items() if each is not None and each.model is not None}
        return tuple(name for name in self.beyond_paging if name not in own)

    @property
    def of_torch(
        self,
    ) -> "NgramFeature | DraftFeature | LookaheadFeature | MedusaFeature | EagleFeature | Eagle3Feature | None":
        """The speculation method of an embedded engine."""
        return self.ngram or self.draft or self.lookahead or self.medusa or self.eagle or self.eagle3

    @property
    def beyond_paging(self) -> tuple[str, ...]:
        """The requested features other than KV reuse and chunked context."""
        fields = type(self).model_fields
        paging = ("kv_reuse", "chunked_context")
        return tuple(name for name in fields if name not in paging and getattr(self, name) != fields[name].default)
