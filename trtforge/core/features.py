"""What users ask an engine to do, in their own terms: build flags and runtime keys both follow from it, together."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from trtforge.core.config_model import Config

LoraModule = Literal[
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"
]  # fmt: skip
"""Linear layers that an adapter may change, by TensorRT-LLM's names (docs/source/advanced/lora.md)."""

SpeculationMethod = Literal["draft", "medusa", "eagle", "lookahead"]
SPECULATION: tuple[SpeculationMethod, ...] = ("draft", "medusa", "eagle", "lookahead")

Choices = tuple[tuple[int, ...], ...]
"""A tree of draft tokens: for each node the ranks of the candidates on the way to it."""


class LoraFeature(Config):
    """Adapters that requests bring along or name by their task id."""

    adapters: tuple[str, ...] = Field((), description="PEFT directories: they set max_rank and modules.")
    max_rank: int | None = Field(None, ge=1, description="Largest rank; left out: the adapters', else 64.")
    modules: tuple[LoraModule, ...] = Field(
        (), description="Layers that adapters change; left out: the adapters', else attn_q, attn_k, attn_v."
    )
    gpu_fraction: float = Field(0.05, gt=0, lt=1, description="Adapter cache: share of what the KV cache leaves.")
    host_memory: int = Field(1 << 30, ge=1, description="Adapter cache on the host, in bytes.")


class DraftFeature(Config):
    """The engine verifies tokens that a smaller model drafts; the client carries them from one to the other."""

    model: str | None = Field(None, description="Draft model for `trtforge plan`: hub id or directory.")
    tokens: int = Field(5, ge=1, description="Most draft tokens of one step.")


class _Tree(Config):
    draft_tokens: int | None = Field(None, ge=1, description="Most draft tokens of a step; left out: the checkpoint's.")
    choices: Choices | None = Field(None, description="Tree of candidates, such as [[0], [0, 0], [1]].")

    @field_validator("choices")
    @classmethod
    def _is_a_tree(cls, choices: Choices | None) -> Choices | None:
        """The C++ runtime wants every node, not the leaves alone (docs/source/advanced/speculative-decoding.md)."""
        nodes = set(choices or ())
        if choices is not None and (not choices or () in nodes or len(nodes) < len(choices)):
            raise ValueError("choices are paths of at least one token, each once")
        for path in choices or ():
            if min(path) < 0:
                raise ValueError(f"{list(path)} holds a negative rank")
            if len(path) > 1 and path[:-1] not in nodes:
                raise ValueError(f"{list(path)} is there, but not the path to it, {list(path[:-1])}")
        return choices

    @property
    def tree_depth(self) -> int | None:
        """Tokens on the longest way through the choices."""
        return max(map(len, self.choices)) if self.choices is not None else None


class MedusaFeature(_Tree):
    """Heads beside the output head draft the tokens; the checkpoint holds them."""

    heads: int | None = Field(None, ge=1, description="Medusa heads; left out: the checkpoint's.")
    layers: int | None = Field(None, ge=1, description="Residual layers of a head; left out: the checkpoint's.")


class EagleFeature(_Tree):
    """A decoder layer beside the model drafts the tokens; the checkpoint holds it."""

    depth: int | None = Field(
        None, ge=1, description="Times that the draft network runs in a step; left out: the checkpoint's."
    )


class LookaheadFeature(Config):
    """The model drafts for itself: n-grams of a window, and candidates out of earlier ones. Nothing is trained."""

    window: int = Field(4, ge=1, description="N-grams that are looked for at once.")
    ngram: int = Field(3, ge=2, description="Tokens of an n-gram: the most that one step accepts.")
    verification: int = Field(4, ge=0, description="N-grams that are verified in one step.")

    @model_validator(mode="after")
    def _is_legal(self) -> Self:
        """`LookaheadDecodingConfig::isLegal`, cpp/tensorrt_llm/executor/decodingConfig.cpp, and something to verify."""
        if self.draft_tokens == 0:
            raise ValueError("nothing would be drafted: the least is window 2, ngram 2, verification 1")
        return self

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of one step: `calculateSpeculativeResourceTuple` in the same file."""
        return self.ngram - 2 + (self.window - 1 + self.verification) * (self.ngram - 1)


class FeaturesConfig(Config):
    """What the engine can do; build flags and runtime keys both follow from it."""

    kv_reuse: bool = Field(True, description="Share KV blocks between requests with the same prefix.")
    chunked_context: bool = Field(True, description="Cut long prompts into chunks that fit max_num_tokens.")
    lora: LoraFeature | None = Field(None, description="Serve LoRA adapters.")
    draft: DraftFeature | None = Field(None, description="Verify tokens that a draft model proposes.")
    medusa: MedusaFeature | None = Field(None, description="Speculate with the checkpoint's Medusa heads.")
    eagle: EagleFeature | None = Field(None, description="Speculate with the checkpoint's EAGLE network.")
    lookahead: LookaheadFeature | None = Field(None, description="Speculate without any other model.")
    multiple_profiles: bool = Field(
        False, description="Tune kernels for each of several step sizes: faster, and far longer to build."
    )
    weights_on_gpu: float = Field(
        1.0, ge=0, le=1, description="Share of the weights kept on the GPU; the rest streams from the host."
    )
    context_logits: bool = Field(False, description="Requests may ask for the logits of their prompt.")
    generation_logits: bool = Field(False, description="Requests may ask for the logits of their answer.")

    @field_validator("lora", "draft", "medusa", "eagle", "lookahead", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """`lookahead: true` asks for it as it is, false does not."""
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_method(self) -> Self:
        methods = [name for name in SPECULATION if getattr(self, name) is not None]
        if len(methods) > 1:
            raise ValueError(f"{' and '.join(methods)} are {len(methods)} ways to speculate: an engine has one")
        return self

    @property
    def beyond_paging(self) -> tuple[str, ...]:
        """What is asked for besides KV reuse and chunked context."""
        fields = type(self).model_fields
        paging = ("kv_reuse", "chunked_context")
        return tuple(name for name in fields if name not in paging and getattr(self, name) != fields[name].default)
