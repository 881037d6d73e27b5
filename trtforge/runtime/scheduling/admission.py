"""Validates requests before they are queued."""

from operator import index
from typing import Protocol

import numpy as np

from trtforge.core.defaults import MOST_FACTOR
from trtforge.core.errors import RequestError
from trtforge.core.features import FeaturesConfig, LookaheadFeature
from trtforge.engine_process.context_phase import request_digest
from trtforge.engine_process.requests import (
    GUIDE_KINDS,
    MOST_DIVERSITY_RATE,
    MOST_LENGTH_PENALTY,
    MOST_TOP_LOG_PROBS,
    DraftTokens,
    GenerationRequest,
    SamplingParams,
)
from trtforge.engine_process.retention import LONGEST_SALT, wrong_retention
from trtforge.runtime.scheduling.batch_limits import BatchLimits
from trtforge.runtime.scheduling.blocks import BlockManager

_LARGEST_FACTOR = MOST_FACTOR * (1 + 2**-23)
"""Includes the rounding error of float32."""
_MOST_LOGITS = 256 << 20
_MOST_SCORES = 20_000  # about 0.5 MB in a frame


class Adapters(Protocol):
    """The LoRA adapters that requests may name."""

    def why_refused(self, request: GenerationRequest) -> RequestError | None:
        """Why the request's adapter is refused; None if there is none, or it can be used."""


def why_refused(
    request: GenerationRequest,
    limits: BatchLimits,
    features: FeaturesConfig,
    *,
    vocab_size: int,
    blocks: BlockManager,
    chunked_context: bool,
    adapters: Adapters,
    speculation: object = None,
) -> RequestError | None:
    """Why a request is refused; None if it can be served.

    `adapters` keep the LoRA adapter that comes with an accepted request. `speculation`: the feature that drafts tokens.
    """
    try:
        return (
            _wrong_lengths(request, limits, vocab_size, blocks, chunked_context=chunked_context)
            or _wrong_priority(request)
            or _wrong_cache_use(request)
            or _wrong_phase(request, vocab_size)
            or _wrong_beams(request)
            or _wrong_drafts(request, limits, vocab_size)
            or _wrong_guide(request, vocab_size)
            or _wrong_lookahead(request, speculation)
            or _wrong_sampling(request.sampling, vocab_size)
            or wrong_logits(request, features, vocab_size, limits)
            or adapters.why_refused(request)  # last, as it keeps the adapter
        )
    except (TypeError, ValueError, OverflowError) as error:  # of values that are no numbers
        return RequestError(f"the request cannot be read: {error!r:.200}", hint="Give each value in its type.")


def _wrong_lengths(
    request: GenerationRequest, limits: BatchLimits, vocab_size: int, blocks: BlockManager, *, chunked_context: bool
) -> RequestError | None:
    prompt = request.prompt
    if not prompt:
        return RequestError("the prompt is empty", hint="Send at least one token.")
    if request.max_tokens < 1:
        return RequestError(f"max_tokens is {request.max_tokens}", hint="Ask for at least one token.")
    table = request.prompt_table
    if min(prompt) < 0 or max(prompt) >= vocab_size + (0 if table is None else table.rows):
        return RequestError(
            f"the prompt holds token ids outside of the vocabulary of {vocab_size}",
            hint="Tokenize with the tokenizer of this model.",
        )
    banned = [token for word in request.bad_words for token in word]
    if banned and (min(banned) < 0 or max(banned) >= vocab_size):
        return RequestError(
            f"a bad word holds token ids outside of the vocabulary of {vocab_size}",
            hint="Tokenize with the tokenizer of this model.",
        )
    longest = min(limits.max_input_len, limits.max_seq_len - 1)
    if len(prompt) > longest:
        return RequestError(
            f"the prompt has {len(prompt)} tokens, this engine takes at most {longest}",
            hint="Shorten the prompt, or compile with a larger max_input_len and max_seq_len.",
        )
    if len(prompt) > limits.max_num_tokens and not chunked_context:
        return RequestError(
            f"the prompt has {len(prompt)} tokens, max_num_tokens is {limits.max_num_tokens}",
            hint="Serve with chunked context, or raise max_num_tokens, the engine's or that of serving.",
        )
    beams = request.beams.width if request.beams is not None else 1
    most = min(limits.max_beam_width, limits.max_batch_size, limits.max_num_tokens)
    if beams > most:
        return RequestError(
            f"beam_width is {beams}, this engine takes at most {most}",
            hint="Ask for fewer beams, or compile with a larger max_beam_width and max_batch_size.",
        )
    held = min(len(prompt) + request.most_new, limits.max_seq_len) - 1
    needed = beams * (blocks.blocks_for(held) if beams > 1 else blocks.most_held(held))
    if needed > blocks.num_blocks:
        size = blocks.tokens_per_block
        tokens = needed * size if beams > 1 else min(held, needed * size)
        return RequestError(
            f"prompt and output may need {tokens} tokens of KV cache, which holds {blocks.num_blocks * size}",
            hint="Ask for fewer tokens, or give the KV cache more memory.",
        )
    scores = len(prompt) * (1 + request.sampling.top_log_probs) if request.sampling.prompt_log_probs else 0
    if scores > _MOST_SCORES:
        return RequestError(
            f"the log probabilities of this prompt are {scores} values, the limit of an answer is {_MOST_SCORES}",
            hint="Shorten the prompt, or ask for fewer alternatives at each token.",
        )
    return None


def _wrong_priority(request: GenerationRequest) -> RequestError | None:
    if not 0 <= request.priority <= 1:  # not a number included
        return RequestError(f"priority is {request.priority:g}", hint="It must be between 0 and 1.")
    return None


def _wrong_cache_use(request: GenerationRequest) -> RequestError | None:
    wrong = None if request.kv_retention is None else wrong_retention(request.kv_retention)
    if wrong is not None:
        return RequestError(f"{wrong.name} of kv_retention {wrong.problem}", hint="Give a priority to each token once.")
    salt = request.cache_salt
    if salt is not None and not (0 < len(salt) <= LONGEST_SALT and salt.encode()):
        return RequestError(f"cache_salt has {len(salt)} characters", hint=f"It must have 1 to {LONGEST_SALT}.")
    return None


def _wrong_phase(request: GenerationRequest, vocab_size: int) -> RequestError | None:
    phase = request.context_phase
    if not request.context_only and phase is None:
        return None
    kind = "context_only" if phase is None else "generation_only"
    if request.beams is not None and request.beams.width > 1:
        return RequestError(f"a {kind} request cannot use beam search", hint="Set beam_width to 1.")
    if phase is None:
        return None
    if request.context_only:
        return RequestError(
            "context_phase_params is given for a context_only request", hint="Send it with generation_only requests."
        )
    if phase.prompt != request_digest(request):
        return RequestError(
            "context_phase_params is of another prompt, adapter or prompt table",
            hint="Send both requests with the same prompt, tokenizer, adapter and prompt table.",
        )
    tokens = [token for token, _ in phase.top] + [phase.first_token] * (phase.first_token not in request.end_ids)
    unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if unknown is not None:
        return RequestError(
            f"context_phase_params has token {unknown}, the vocabulary has {vocab_size} tokens",
            hint="Send both requests to engines of the same model.",
        )
    if request.sampling.prompt_log_probs or request.context_logits or request.generation_logits:
        return RequestError(
            "a generation_only request returns neither logits nor log probabilities of the prompt",
            hint="Ask for them with the context_only request.",
        )
    if request.sampling.return_log_probs and phase.log_prob is None:
        return RequestError(
            "context_phase_params has no log probability of the first token",
            hint="Request log probabilities in the context_only request too.",
        )
    return None


def wrong_logits(
    request: GenerationRequest, features: FeaturesConfig, vocab_size: int, limits: BatchLimits
) -> RequestError | None:
    """Why the logits that a request asks for are refused."""
    if request.context_logits and not features.context_logits:
        return RequestError(
            "this engine returns no context logits", hint="Compile it with --feature context_logits=true."
        )
    if request.generation_logits and not features.generation_logits:
        return RequestError(
            "this engine returns no generation logits", hint="Compile it with --feature generation_logits=true."
        )
    output = min(request.most_new, limits.max_seq_len - len(request.prompt))
    rows = request.context_logits * len(request.prompt) + request.generation_logits * output
    if 4 * vocab_size * rows > _MOST_LOGITS:
        return RequestError(
            f"the logits of {rows} tokens take {4 * vocab_size * rows} bytes, the limit of an answer is {_MOST_LOGITS}",
            hint="Shorten the prompt, or ask for fewer tokens.",
        )
    if rows and request.beams is not None and request.beams.width > 1:
        return RequestError("beam search does not return logits", hint="Set beam_width to 1 to get them.")
    return None


def _wrong_lookahead(request: GenerationRequest, most: object) -> RequestError | None:
    """`LookaheadDecodingConfig::isLegal` and `isLE`, cpp/tensorrt_llm/executor/decodingConfig.cpp."""
    asked = request.lookahead
    if asked is None:
        return None
    if not isinstance(most, LookaheadFeature):
        return RequestError(
            "this engine has no lookahead decoding", hint="Leave its sizes out, or compile with --feature lookahead."
        )
    for name, size, least, largest in (
        ("lookahead_window_size", asked.window, 1, most.window),
        ("lookahead_ngram_size", asked.ngram, 1, most.ngram),
        ("lookahead_verification_set_size", asked.verification, 0, most.verification),
    ):
        if not least <= size <= largest:
            return RequestError(f"{name} is {size}", hint=f"It must be from {least} to this engine's {largest}.")
    if asked.ngram == 1 and (asked.window, asked.verification) != (1, 0):
        return RequestError(
            "lookahead_ngram_size is 1, so no tokens are drafted",
            hint="Use 2 or more; to turn lookahead off, also set the window to 1 and the verification set to 0.",
        )
    return None


def _wrong_beams(request: GenerationRequest) -> RequestError | None:
    if request.beams is None:
        return None
    if not 1 <= index(request.beams.returned) <= request.beams.width:
        return RequestError(
            f"the request asks for {request.beams.returned} of {request.beams.width} beams",
            hint=f"Ask for 1 to {request.beams.width}.",
        )
    if not abs(request.beams.length_penalty) <= MOST_LENGTH_PENALTY:  # not a number included
        return RequestError(
            f"len_penalty is {request.beams.length_penalty:g}",
            hint=f"Give a number from -{MOST_LENGTH_PENALTY} to {MOST_LENGTH_PENALTY}.",
        )
    if not 0 <= request.beams.diversity_rate <= MOST_DIVERSITY_RATE:
        return RequestError(
            f"beam_search_diversity_rate is {request.beams.diversity_rate:g}",
            hint=f"Give a number from 0 to {MOST_DIVERSITY_RATE}.",
        )
    if request.beams.width > 1 and (request.sampling.prompt_log_probs or request.sampling.top_log_probs):
        return RequestError(
            "beam search does not return top log probabilities or log probabilities of the prompt",
            hint="Set beam_width to 1 to get them.",
        )
    if request.beams.width > 1 and request.guide is not None:
        return RequestError("beam search does not support a guide", hint="Leave out the guide, or set beam_width to 1.")
    return None


def _wrong_drafts(request: GenerationRequest, limits: BatchLimits, vocab_size: int) -> RequestError | None:
    """`ExternalDraftTokensConfig`, cpp/tensorrt_llm/executor/decodingConfig.cpp."""
    drafts = request.drafts
    if drafts is None:
        return None
    tokens, room = drafts.tokens, limits.max_seq_len - len(request.prompt)
    if not tokens:
        return RequestError("draft_input_ids is empty", hint="Give the draft tokens, or leave out their settings.")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return RequestError(
            f"draft_input_ids holds token ids outside of the vocabulary of {vocab_size}",
            hint="Draft with a model of the same vocabulary.",
        )
    if len(tokens) > room:
        return RequestError(
            f"draft_input_ids has {len(tokens)} tokens, max_seq_len leaves {room} after the prompt",
            hint="Send fewer draft tokens, or compile with a larger max_seq_len.",
        )
    if not 0 <= drafts.threshold <= 1:  # not a number included
        return RequestError(
            f"draft_acceptance_threshold is {drafts.threshold:g}", hint="It must be between 0 (none) and 1."
        )
    if request.beams is not None and request.beams.width > 1:
        return RequestError(
            "draft_input_ids is given for a beam search", hint="Send no draft tokens, or ask for a beam_width of 1."
        )
    return _wrong_draft_logits(drafts, vocab_size)


def _wrong_draft_logits(drafts: DraftTokens, vocab_size: int) -> RequestError | None:
    size = 4 * len(drafts.tokens) * vocab_size
    if not drafts.logits:
        return None
    if len(drafts.logits) != size:
        return RequestError(
            f"draft_logits has {len(drafts.logits) // 4} values",
            hint=f"Give one for each of the {len(drafts.tokens)} draft tokens and {vocab_size} tokens.",
        )
    if size > _MOST_LOGITS:
        return RequestError(
            f"draft_logits has {size} bytes, the limit of a request is {_MOST_LOGITS}", hint="Send fewer draft tokens."
        )
    if not np.isfinite(np.frombuffer(drafts.logits, dtype=np.float32)).all():
        return RequestError(
            "draft_logits has values that are not finite", hint="Give a low number for a token that was ruled out."
        )
    return None


def _wrong_guide(request: GenerationRequest, vocab_size: int) -> RequestError | None:
    if request.guide is None:
        return None
    if request.guide.kind not in GUIDE_KINDS:
        return RequestError(
            f"the guide is of type {request.guide.kind!r}", hint=f"Give one of {', '.join(GUIDE_KINDS)}."
        )
    if request.guide.kind == "json" and request.guide.text:
        return RequestError("a guide of type json has no text", hint="For a schema, use type json_schema.")
    if not any(0 <= token < vocab_size for token in request.end_ids):
        return RequestError(
            "guided decoding needs an end id to end the output when the guide is complete",
            hint="Give the model's end id, and do not ignore it.",
        )
    return None


def _require_whole(sampling: SamplingParams) -> None:
    """Raises TypeError if a number that must be whole is a fraction, infinite or no number."""
    numbers = sampling.seed, sampling.top_k, sampling.top_p_reset_id, sampling.min_tokens, sampling.top_log_probs
    for number in (*numbers, sampling.no_repeat_ngram_size, sampling.prompt_ignore_length):
        index(number or 0)


def _wrong_sampling(sampling: SamplingParams, vocab_size: int) -> RequestError | None:
    _require_whole(sampling)
    factors, sums = f"from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}", f"from {-MOST_FACTOR:g} to {MOST_FACTOR:g}"
    allowed = (
        (
            "temperature",
            sampling.temperature,
            not sampling.temperature or 1 / _LARGEST_FACTOR <= sampling.temperature <= _LARGEST_FACTOR,
            f"0, or {factors}",
        ),
        ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 0, "0 or more"),
        ("min_tokens", sampling.min_tokens, sampling.min_tokens >= 0, "0 or more"),
        ("top_p", sampling.top_p, sampling.top_p is None or 0 <= sampling.top_p <= 1, "between 0 and 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "between 0 and 1"),
        ("no_repeat_ngram_size", sampling.no_repeat_ngram_size, sampling.no_repeat_ngram_size >= 0, "0 or more"),
        ("prompt_ignore_length", sampling.prompt_ignore_length, sampling.prompt_ignore_length >= 0, "0 or more"),
        ("top_p_decay", sampling.top_p_decay, 0 < sampling.top_p_decay <= 1, "greater than 0 and at most 1"),
        ("top_p_min", sampling.top_p_min, 0 < sampling.top_p_min <= 1, "greater than 0 and at most 1"),
        (
            "top_p_reset_id",
            sampling.top_p_reset_id,
            -1 <= sampling.top_p_reset_id < vocab_size,
            f"-1 for none, or a token id below {vocab_size}",
        ),
        (
            "top_log_probs",
            sampling.top_log_probs,
            0 <= sampling.top_log_probs <= MOST_TOP_LOG_PROBS,
            f"from 0 to {MOST_TOP_LOG_PROBS}",
        ),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            1 / _LARGEST_FACTOR <= sampling.repetition_penalty <= _LARGEST_FACTOR,
            factors,
        ),
        ("presence_penalty", sampling.presence_penalty, abs(sampling.presence_penalty) <= _LARGEST_FACTOR, sums),
        ("frequency_penalty", sampling.frequency_penalty, abs(sampling.frequency_penalty) <= _LARGEST_FACTOR, sums),
        (
            "the length of embedding_bias",
            len(sampling.embedding_bias),
            len(sampling.embedding_bias) in (0, vocab_size),
            f"0 or the vocabulary size, {vocab_size}",
        ),
    )
    for name, value, is_allowed, range_ in allowed:
        if not is_allowed:
            return RequestError(f"{name} is {value}", hint=f"It must be {range_}.")
    return _wrong_bias(sampling)


def _wrong_bias(sampling: SamplingParams) -> RequestError | None:
    """Minus infinity rules a token out; something must be left."""
    if not len(sampling.embedding_bias):
        return None
    bias = np.asarray(sampling.embedding_bias, dtype=np.float32)
    if bias.ndim > 1:
        return RequestError(f"embedding_bias has the shape {bias.shape}", hint="Give one number for each token.")
    wrong = bias[~(bias < np.inf)]  # not a number included
    if wrong.size:
        return RequestError(f"embedding_bias has {wrong[0]}", hint="Give numbers, or -inf to exclude a token.")
    if not np.isfinite(bias).any():
        return RequestError("embedding_bias excludes all tokens", hint="Leave at least one finite number.")
    return None
