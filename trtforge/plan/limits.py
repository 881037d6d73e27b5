"""The limits of an engine: those of the recipe, and those derived from it and the model.

They apply to both backends; the rules are those of TensorRT-LLM's builder (tensorrt_llm/builder.py, 0.19 to 1.2).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.formats.rope import scaled_length
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.speculation import Speculation, speculation_of

DEFAULT_NUM_TOKENS = 8192
FALLBACK_SEQ_LEN = 2048
"""For a model without max_position_embeddings."""


class Positions(Protocol):
    """The fields of a TensorRT-LLM checkpoint's config.json that limits are derived from."""

    @property
    def max_position_embeddings(self) -> int | None:
        """The model's number of positions, without RoPE scaling."""

    @property
    def rotary_scaling(self) -> dict[str, Any] | None:
        """The RoPE scaling."""

    @property
    def position_embedding_type(self) -> str:
        """The type of position embedding; `learned_absolute` cannot be extended."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine in tokens and requests. `longest_prompt`: tokens of the longest prompt that is accepted.

    `speculation`: None without speculative decoding.
    """

    max_batch_size: int
    max_beam_width: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    tokens_per_block: int
    longest_prompt: int
    warnings: tuple[str, ...] = ()
    speculation: Speculation | None = None

    @property
    def spare_tokens(self) -> int:
        """KV positions that a request needs beyond its length, for draft tokens that may be rejected."""
        return self.speculation.spare_tokens if self.speculation else 0

    @property
    def verified_tokens(self) -> int:
        """Tokens of one sequence in a generation step: the draft tokens plus one."""
        return 1 + (self.speculation.draft_tokens if self.speculation else 0)

    @property
    def build_fields(self) -> dict[str, int]:
        """The limits as fields of TensorRT-LLM's BuildConfig."""
        return {
            "max_batch_size": self.max_batch_size,
            "max_input_len": self.max_input_len,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "max_beam_width": self.max_beam_width,
        }


def derive_limits(checkpoint: Positions, engine: EngineConfig, default_tokens_per_block: int) -> EngineLimits:
    """The limits of an engine for `checkpoint`. Raises ForgeError for an impossible limit in the recipe."""
    warnings: list[str] = []
    tokens_per_block = engine.tokens_per_block or default_tokens_per_block
    max_seq_len = _max_seq_len(checkpoint, engine, warnings)
    _check_input_fits(engine, max_seq_len)
    _check_tables(engine)
    own = checkpoint if isinstance(checkpoint, CheckpointConfig) else None
    speculation = speculation_of(engine.features, own)
    max_num_tokens = _max_num_tokens(engine, speculation, max_seq_len, tokens_per_block, warnings)
    longest_prompt = max_seq_len - 1
    if not engine.features.chunked_context:
        longest_prompt = min(longest_prompt, max_num_tokens)
    wanted = engine.max_input_len or max_seq_len - 1
    if wanted > longest_prompt:
        _without_chunks(engine, max_num_tokens, warnings)
    return EngineLimits(
        max_batch_size=engine.max_batch_size,
        max_beam_width=engine.max_beam_width,
        max_input_len=min(wanted, longest_prompt),
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        tokens_per_block=tokens_per_block,
        longest_prompt=longest_prompt,
        warnings=tuple(warnings),
        speculation=speculation,
    )


def _check_tables(engine: EngineConfig) -> None:
    """Raises ForgeError for fewer rows than requests.

    Each request gets an equal share of the rows (PromptTuningBuffers, cpp/tensorrt_llm/batch_manager).
    """
    rows, batch = engine.features.max_prompt_embedding_table_size, engine.max_batch_size
    if 0 < rows < batch:
        raise ForgeError(
            f"engine.features.max_prompt_embedding_table_size is {rows}, which is less than max_batch_size {batch}",
            hint="Give the rows of a request's prompt table times max_batch_size.",
        )


def model_seq_len(checkpoint: Positions) -> int | None:
    """The model's context length including RoPE scaling; None if config.json does not give it."""
    return scaled_length(checkpoint.max_position_embeddings, checkpoint.rotary_scaling)


def _max_seq_len(checkpoint: Positions, engine: EngineConfig, warnings: list[str]) -> int:
    context_length = model_seq_len(checkpoint)
    if engine.max_seq_len is None:
        return context_length or FALLBACK_SEQ_LEN
    if context_length is not None and engine.max_seq_len > context_length:
        if checkpoint.position_embedding_type == "learned_absolute":
            raise ForgeError(
                f"engine.max_seq_len {engine.max_seq_len} is more than the model's {context_length} learned positions",
                hint=f"Use at most {context_length}.",
            )
        warnings.append(
            f"engine.max_seq_len {engine.max_seq_len} is more than the model's context length of {context_length}: "
            "answers beyond it lose quality."
        )
    return engine.max_seq_len


def _check_input_fits(engine: EngineConfig, max_seq_len: int) -> None:
    if engine.max_input_len is not None and engine.max_input_len >= max_seq_len:
        of_model = "" if engine.max_seq_len else " (the model's context length)"
        raise ForgeError(
            f"engine.max_input_len {engine.max_input_len} leaves no room for an answer in max_seq_len "
            f"{max_seq_len}{of_model}",
            hint=f"max_seq_len is prompt plus answer: use a max_input_len of at most {max_seq_len - 1}, "
            "or a larger engine.max_seq_len.",
        )


def _max_num_tokens(
    engine: EngineConfig,
    speculation: Speculation | None,
    max_seq_len: int,
    tokens_per_block: int,
    warnings: list[str],
) -> int:
    """Tokens of one step: at least one token per beam and one KV block, at most the tokens of all sequences.

    With speculation at least the draft tokens of all sequences plus one each, to which `build()` would raise it
    silently.
    """
    each = engine.max_beam_width if speculation is None else speculation.draft_tokens + 1
    generation = engine.max_batch_size * each
    least = max(generation, tokens_per_block)
    most = max(max_seq_len * engine.max_batch_size, least)
    given = engine.max_num_tokens
    if given is None:
        prompt = 0 if engine.features.chunked_context else engine.max_input_len or 0
        return min(max(DEFAULT_NUM_TOKENS, prompt, least), most)
    if given < least:
        of = "max_batch_size x max_beam_width" if speculation is None else "max_batch_size x (draft tokens + 1)"
        raise ForgeError(
            f"engine.max_num_tokens {given} is too small: an iteration needs {generation} tokens "
            f"({of}) and a KV block of {tokens_per_block}",
            hint=f"Use at least {least}, or leave it out.",
        )
    if given > most:
        warnings.append(
            f"engine.max_num_tokens {given} is lowered to {most}: {engine.max_batch_size} sequences of {max_seq_len} "
            "tokens hold no more."
        )
    return min(given, most)


def _without_chunks(engine: EngineConfig, max_num_tokens: int, warnings: list[str]) -> None:
    """Warn that without chunked context a prompt must fit one step. Raises ForgeError if max_input_len is longer."""
    if engine.max_input_len is not None:
        raise ForgeError(
            f"engine.max_input_len {engine.max_input_len} is more than max_num_tokens {max_num_tokens}: without "
            "chunked context a prompt must fit in one iteration",
            hint=f"Raise engine.max_num_tokens to {engine.max_input_len}, lower max_input_len, "
            "or build with engine.features.chunked_context.",
        )
    warnings.append(
        f"Prompts are limited to {max_num_tokens} tokens (max_num_tokens): use chunked context or a larger "
        "max_num_tokens for longer ones."
    )
