"""The limits of an engine: what the recipe gives, and what follows from it and the model where it gives nothing.

Both backends keep these limits; the rules are those of TensorRT-LLM's builder (tensorrt_llm/builder.py, 0.19 to 1.2).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.formats.trtllm import CheckpointConfig, Quantization
from trtforge.plan.speculation import Speculation, speculation_of

DEFAULT_NUM_TOKENS = 8192
FALLBACK_SEQ_LEN = 2048
"""For a model that does not say how many positions it has."""

_LENGTH_INCLUDES_SCALING = frozenset({"su", "longrope", "llama3"})
"""Rotary scalings whose models give max_position_embeddings with the factor already in it."""

FP8_ATTENTION = frozenset({"FP8", "W4A8_AWQ", "NVFP4"})
"""Quantisations with which context attention can compute in FP8."""


class Positions(Protocol):
    """What limits follow from, named as config.json of a TensorRT-LLM checkpoint names it."""

    @property
    def max_position_embeddings(self) -> int | None:
        """Positions that the model says it has."""

    @property
    def rotary_scaling(self) -> dict[str, Any] | None:
        """The scaling of its rotary embedding."""

    @property
    def position_embedding_type(self) -> str:
        """What its position embedding is; that of `learned_absolute` cannot be stretched."""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of an engine in tokens and requests. `longest_prompt` is the most that a request's prompt may have.

    `speculation`: None where a step adds one token to a sequence.
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
        """KV positions that a request needs beyond its length, for tokens that may yet be rejected."""
        return self.speculation.spare_tokens if self.speculation else 0

    @property
    def verified_tokens(self) -> int:
        """Tokens of one sequence in a generation step: those that are drafted, and one."""
        return 1 + (self.speculation.draft_tokens if self.speculation else 0)

    @property
    def build_fields(self) -> dict[str, int]:
        """The fields of TensorRT-LLM's BuildConfig that say these limits."""
        return {
            "max_batch_size": self.max_batch_size,
            "max_input_len": self.max_input_len,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "max_beam_width": self.max_beam_width,
        }


def derive_limits(checkpoint: Positions, engine: EngineConfig, default_tokens_per_block: int) -> EngineLimits:
    """The limits of an engine for `checkpoint`. Raises ForgeError for a limit that is given and impossible."""
    warnings: list[str] = []
    tokens_per_block = engine.tokens_per_block or default_tokens_per_block
    max_seq_len = _max_seq_len(checkpoint, engine, warnings)
    _check_input_fits(engine, max_seq_len)
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


def has_paged_context(quantization: Quantization) -> bool:
    """Whether there is paged context FMHA, which KV reuse and chunked context need.

    `build()` turns it off for an INT8 KV cache, and for an FP8 one unless the linear layers are FP8 too.
    """
    cache = quantization.kv_cache_quant_algo
    return cache != "INT8" and (cache != "FP8" or quantization.quant_algo in FP8_ATTENTION)


def model_seq_len(checkpoint: Positions) -> int | None:
    """The positions that the model is made for, its rotary scaling included; None where config.json does not say."""
    positions = checkpoint.max_position_embeddings
    if positions is None or not checkpoint.rotary_scaling:
        return positions
    scaling = checkpoint.rotary_scaling
    kind = scaling.get("type", scaling.get("rope_type"))
    return positions if kind in _LENGTH_INCLUDES_SCALING else int(positions * float(scaling.get("factor") or 1.0))


def _max_seq_len(checkpoint: Positions, engine: EngineConfig, warnings: list[str]) -> int:
    made_for = model_seq_len(checkpoint)
    if engine.max_seq_len is None:
        return made_for or FALLBACK_SEQ_LEN
    if made_for is not None and engine.max_seq_len > made_for:
        if checkpoint.position_embedding_type == "learned_absolute":
            raise ForgeError(
                f"engine.max_seq_len {engine.max_seq_len} is more than the {made_for} positions that the model learned",
                hint=f"Use at most {made_for}.",
            )
        warnings.append(
            f"engine.max_seq_len {engine.max_seq_len} is more than the {made_for} positions that the model is made "
            "for: answers past them lose quality."
        )
    return engine.max_seq_len


def _check_input_fits(engine: EngineConfig, max_seq_len: int) -> None:
    if engine.max_input_len is not None and engine.max_input_len >= max_seq_len:
        of_model = "" if engine.max_seq_len else " (what the model is made for)"
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
    """Tokens of one step: enough for a token of every beam and for one KV block, never more than all sequences hold.

    With speculation enough for every sequence's draft tokens too, to which `build()` would lift it without a word.
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
            f"engine.max_num_tokens {given} is too small: a step must hold {generation} tokens "
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
    """A prompt that cannot be cut must fit one step: an error where a longer one is asked for, else a warning."""
    if engine.max_input_len is not None:
        raise ForgeError(
            f"engine.max_input_len {engine.max_input_len} does not fit a step of {max_num_tokens} tokens, and without "
            "chunked context a prompt is one step",
            hint=f"Raise engine.max_num_tokens to {engine.max_input_len}, lower max_input_len, "
            "or build with engine.features.chunked_context.",
        )
    warnings.append(
        f"Prompts end at {max_num_tokens} tokens (max_num_tokens): chunked context or a larger max_num_tokens "
        "lifts that."
    )
