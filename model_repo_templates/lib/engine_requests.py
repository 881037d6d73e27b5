"""Converts the tensors of an engine request to generation requests, or says why they cannot be served."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from input_names import GUIDE, GUIDE_TYPE, PHASE, SAMPLING
from input_values import INT32_MAX, InputValues, most_sequences
from numpy.typing import NDArray
from request_tensors import ADAPTER, DRAFTS, TABLE, draft_tokens, prompt_table, sent_adapter
from request_types import of_type
from responder import RequestFailed
from retention_inputs import RETENTION_INPUTS, retention_of
from word_lists import LONGEST_WORDS, MOST_WORDS, words_of

from trtforge.engine_process.context_phase import RequestType
from trtforge.engine_process.requests import (
    DEFAULT_PRIORITY,
    GUIDE_KINDS,
    LONGEST_GUIDE,
    MOST_TOP_LOG_PROBS,
    UINT64_MAX,
    BeamParams,
    GenerationRequest,
    Guide,
    LookaheadSizes,
    SamplingParams,
    with_seed,
)
from trtforge.engine_process.retention import LONGEST_SALT

_READ = frozenset(
    {
        "input_ids",
        "input_lengths",
        "request_output_len",
        "end_id",
        "pad_id",
        "stop_words_list",
        "bad_words_list",
        "embedding_bias",
        "temperature",
        "runtime_top_k",
        "runtime_top_p",
        "runtime_top_p_min",
        "runtime_top_p_decay",
        "runtime_top_p_reset_ids",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "num_return_sequences",
        "beam_width",
        "len_penalty",
        "early_stopping",
        "beam_search_diversity_rate",
        "return_log_probs",
        "return_prompt_logprobs",
        "top_logprobs",
        "priority",
        "cache_salt",
        *SAMPLING,
        *RETENTION_INPUTS,
        "return_perf_metrics",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "exclude_input_in_output",
        "streaming",
        "stop",
    }
)
_LORA = "lora_task_id"
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_NEUTRAL: Mapping[str, float] = {"return_context_logits": 0, "return_generation_logits": 0, DRAFTS[2]: 0}
"""Inputs that are accepted with their neutral value only."""
_TOP_P_MIN = 1e-6


@dataclass(frozen=True)
class RequestLimits:
    """The limits that a request is checked against. `end_ids`: the model's own.

    `guided`: whether answers can be guided; `lora_task_ids`: the adapters that the engine has; `seed`: of requests
    without one, None if the engine then draws it; `logits`: inputs that ask for logits, if the engine returns them.
    `lookahead`: whether it drafts by lookahead decoding, whose sizes a request may lower; `takes_adapters`,
    `takes_drafts`, `takes_prompt_tables`: whether requests may bring adapters, draft tokens and prompt tables.
    `takes_phases`: whether the engine computes one phase of a request.
    """

    vocab_size: int
    max_batch_size: int
    end_ids: tuple[int, ...]
    max_beam_width: int = 1
    guided: bool = True
    lora_task_ids: tuple[int, ...] = ()
    seed: int | None = 0
    logits: tuple[str, ...] = ()
    lookahead: bool = False
    takes_adapters: bool = False
    takes_drafts: bool = True
    takes_prompt_tables: bool = False
    takes_phases: bool = True

    @property
    def inputs(self) -> frozenset[str]:
        """The inputs that this engine reads."""
        more = ({GUIDE_TYPE, GUIDE} if self.guided else set()) | ({_LORA} if self.lora_task_ids else set())
        more |= ({_LORA, *ADAPTER} if self.takes_adapters else set()) | (set(DRAFTS) if self.takes_drafts else set())
        more |= (set(TABLE) if self.takes_prompt_tables else set()) | ({PHASE} if self.takes_phases else set())
        return _READ | more | set(self.logits) | (set(_LOOKAHEAD) if self.lookahead else set())


@dataclass(frozen=True)
class RequestedSequence:
    """One sequence to generate: the `index`-th one for prompt `item` of the request."""

    item: int
    index: int
    request: GenerationRequest


def requested_sequences(
    inputs: Mapping[str, NDArray[Any]],
    limits: RequestLimits,
    *,
    model_end_ids: bool = False,
    names: Mapping[str, str] | None = None,
    phases: RequestType = "context_and_generation",
) -> list[RequestedSequence]:
    """All sequences of a request. Raises RequestFailed if a value is out of range.

    `model_end_ids`: end at the model's own end ids instead of `end_id`; `names`: input names to show in errors;
    `phases`: which ones of the request are to be computed.
    """
    values = InputValues(inputs, names)
    _check_supported(values, limits.inputs)
    whole = phases == "context_and_generation"
    if not whole and not limits.takes_phases:
        raise RequestFailed(f"request_type {phases} is not supported by this engine")
    prompts = len(values.array("input_lengths"))
    found: list[RequestedSequence] = []
    for item in range(prompts):
        request = of_type(_request(values, item, limits, model_end_ids=model_end_ids), phases, values, item)
        count = 1  # a beam search returns several sequences in one
        if request.beams is None:
            most = max(1, most_sequences(limits.max_batch_size) // prompts)
            count = values.integer("num_return_sequences", item, 1, 1, most if whole else 1)
        seed = limits.seed if request.sampling.seed is None else request.sampling.seed
        for index in range(count):
            own = request if not index or seed is None else with_seed(request, seed + index)
            copy_of = str(len(found) - index) if index else None
            sent = None if index else own.sent_adapter  # once is enough
            found.append(RequestedSequence(item, index, replace(own, copy_of=copy_of, sent_adapter=sent)))
    return found


def _check_supported(values: InputValues, read: frozenset[str]) -> None:
    """Raises RequestFailed, naming the input, for inputs that this engine would ignore."""
    for name in values:
        if name in read or name not in values:
            continue
        if name not in _NEUTRAL:
            raise RequestFailed(f"{values.shown(name)} is not supported by this engine")
        array = values.array(name)
        wrong = array[array != _NEUTRAL[name]]
        if wrong.size:
            only = "false" if array.dtype == bool else f"{_NEUTRAL[name]:g}"
            shown = str(wrong.flat[0]).lower()
            raise RequestFailed(f"{values.shown(name)} is {shown}; this engine supports only {only}")


def _request(values: InputValues, item: int, limits: RequestLimits, *, model_end_ids: bool) -> GenerationRequest:
    end_id = values.integer("end_id", item, -1, -1, limits.vocab_size - 1)
    values.integer("pad_id", item, -1, -1, INT32_MAX)
    table = prompt_table(values, item)
    return GenerationRequest(
        request_id="",
        prompt=_prompt(values, item, limits.vocab_size + (0 if table is None else table.rows)),
        prompt_table=table,
        max_tokens=values.integer("request_output_len", item, None, 1, INT32_MAX),
        sampling=_sampling(values, item, limits.vocab_size),
        end_ids=frozenset(limits.end_ids if model_end_ids else [end_id] if end_id >= 0 else []),
        stop_words=_words(values, "stop_words_list", item, limits.vocab_size),
        bad_words=_words(values, "bad_words_list", item, limits.vocab_size),
        guide=_guide(values, item),
        lora_task_id=_adapter(values, item, limits),
        beams=_beams(values, item, limits.max_beam_width),
        context_logits=values.flag("return_context_logits", False),
        generation_logits=values.flag("return_generation_logits", False),
        priority=_priority(values, item),
        lookahead=_lookahead(values, item),
        sent_adapter=sent_adapter(values, item),
        streamed=values.flag("streaming", False),
        drafts=draft_tokens(values, item, limits.vocab_size),
        kv_retention=retention_of(values, item),
        cache_salt=_cache_salt(values, item),
    )


def _priority(values: InputValues, item: int) -> float:
    """Text models send it; TensorRT-LLM's tensors have none."""
    given = values.share("priority", item, None)
    return DEFAULT_PRIORITY if given is None else given


def _cache_salt(values: InputValues, item: int) -> str | None:
    """Text models send it; TensorRT-LLM's tensors have none."""
    salt = values.text("cache_salt", item)
    if len(salt) > LONGEST_SALT:
        raise values.refused("cache_salt", f"{len(salt)} characters", f"at most {LONGEST_SALT}")
    return salt or None


def _lookahead(values: InputValues, item: int) -> LookaheadSizes | None:
    """All three sizes, or none, as for TensorRT-LLM (`getLookaheadDecodingFromTensors` in its Triton backend)."""
    if not any(name in values for name in _LOOKAHEAD):
        return None
    return LookaheadSizes(*(values.integer(name, item, None, 0, INT32_MAX) for name in _LOOKAHEAD))


def _beams(values: InputValues, item: int, most: int) -> BeamParams | None:
    """The beam search that a request asks for. Its inputs have no effect on a single beam, in TensorRT-LLM too."""
    penalty = values.number("len_penalty", item, 0.0) or 0.0
    diversity = values.number("beam_search_diversity_rate", item, 0.0, 0.0) or 0.0
    width = values.integer("beam_width", item, 1, -INT32_MAX, INT32_MAX)
    if width != 1 and most == 1:
        raise RequestFailed(f"{values.shown('beam_width')} is {width}; this model returns only 1 beam")
    if not 1 <= width <= most:
        raise values.refused("beam_width", width, f"a whole number from 1 to {most}")
    if width == 1:
        return None
    if values.flag("streaming", False):
        raise RequestFailed(
            f"streaming is true and {values.shown('beam_width')} {width}: only one beam can be streamed"
        )
    returned = values.integer("num_return_sequences", item, width, 1, width)
    return BeamParams(width, returned, penalty, values.flag("early_stopping", True), diversity)


def _adapter(values: InputValues, item: int, limits: RequestLimits) -> int | None:
    if _LORA not in values:
        return None
    task = values.integer(_LORA, item, None, 0, UINT64_MAX)
    if task not in limits.lora_task_ids and not limits.takes_adapters:
        raise values.refused(_LORA, task, f"one of this engine's: {', '.join(map(str, limits.lora_task_ids))}")
    return task


def _prompt(values: InputValues, item: int, vocab_size: int) -> tuple[int, ...]:
    rows = values.array("input_ids")
    if item >= len(rows):
        raise RequestFailed(f"{values.shown('input_ids')} has {len(rows)} prompts, input_lengths has more")
    length = values.integer("input_lengths", item, None, 1, rows.shape[1])
    ids = rows[item, :length]
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise RequestFailed(f"{values.shown('input_ids')} holds the id {wrong}; ids are from 0 to {vocab_size - 1}")
    return tuple(ids.tolist())


def _sampling(values: InputValues, item: int, vocab_size: int) -> SamplingParams:
    top_p = values.number("runtime_top_p", item, None, 0.0)
    if top_p is not None and top_p > 1:
        raise values.refused("runtime_top_p", top_p, "from 0 (none) to 1")
    seed = values.integer("seed", item, -1, -1, UINT64_MAX) if "seed" in values else None
    top_k = values.integer("runtime_top_k", item, None, 0, INT32_MAX) if "runtime_top_k" in values else None
    return SamplingParams(
        temperature=values.number("temperature", item, None, 0.0),
        top_k=top_k,
        top_p=top_p or None,
        seed=seed,
        repetition_penalty=values.number("repetition_penalty", item, 1.0, 0.0, above=True) or 1.0,
        presence_penalty=values.number("presence_penalty", item, 0.0) or 0.0,
        frequency_penalty=values.number("frequency_penalty", item, 0.0) or 0.0,
        min_tokens=values.integer("min_tokens", item, 0, 0, INT32_MAX),
        return_log_probs=values.flag("return_log_probs", False),
        top_log_probs=values.integer("top_logprobs", item, 0, 0, MOST_TOP_LOG_PROBS),
        prompt_log_probs=values.flag("return_prompt_logprobs", False),
        embedding_bias=_bias(values, item, vocab_size),
        top_p_decay=_share(values, "runtime_top_p_decay", item, 1.0),
        top_p_min=_share(values, "runtime_top_p_min", item, _TOP_P_MIN),
        top_p_reset_id=values.integer("runtime_top_p_reset_ids", item, -1, -1, vocab_size - 1),
        min_p=values.share("min_p", item, 0.0) or 0.0,
        no_repeat_ngram_size=values.integer("no_repeat_ngram_size", item, 0, 0, INT32_MAX),
        prompt_ignore_length=values.integer("prompt_ignore_length", item, 0, 0, INT32_MAX),
    )


def _share(values: InputValues, name: str, item: int, default: float) -> float:
    """A number greater than 0 and at most 1; 0 is the default."""
    share = values.number(name, item, default, 0.0)
    if share is not None and share > 1:
        raise values.refused(name, share, "from 0 (the default) to 1")
    return share or default


def _bias(values: InputValues, item: int, vocab_size: int) -> tuple[float, ...]:
    if "embedding_bias" not in values:
        return ()
    bias = values.array("embedding_bias")[item]
    if bias.size != vocab_size:
        raise RequestFailed(f"{values.shown('embedding_bias')} has {bias.size} values; the vocabulary has {vocab_size}")
    wrong = bias[np.isnan(bias) | (bias == np.inf)]
    if wrong.size:
        raise values.refused("embedding_bias", wrong.flat[0], "a finite number, or minus infinity to forbid a token")
    return tuple(bias.tolist())


def _guide(values: InputValues, item: int) -> Guide | None:
    """The guide of one prompt; an empty type is none."""
    kind, text = values.text(GUIDE_TYPE, item), values.text(GUIDE, item)
    if not kind:
        if text:
            raise RequestFailed(f"{values.shown(GUIDE_TYPE)} is missing: it says what {values.shown(GUIDE)} is")
        return None
    for known in GUIDE_KINDS:
        if kind == known:
            if not text and known != "json":
                raise RequestFailed(f"{values.shown(GUIDE)} is missing: {known} needs it")
            if len(text) > LONGEST_GUIDE:
                raise values.refused(GUIDE, f"{len(text)} characters", f"at most {LONGEST_GUIDE}")
            return Guide(known, text)
    raise values.refused(GUIDE_TYPE, kind, f"one of {', '.join(GUIDE_KINDS)}")


def _words(values: InputValues, name: str, item: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if name not in values:
        return ()
    lists = values.array(name)[item]
    if lists.shape[-1] > LONGEST_WORDS:
        raise values.refused(name, f"{lists.shape[-1]} tokens", f"at most {LONGEST_WORDS}")
    try:
        words = tuple(words_of(lists))
    except ValueError as error:
        raise RequestFailed(f"{values.shown(name)}: {error}") from None
    if len(words) > MOST_WORDS:
        raise values.refused(name, f"{len(words)} words", f"at most {MOST_WORDS}")
    wrong = [token for word in words for token in word if not 0 <= token < vocab_size]
    if wrong:
        raise RequestFailed(f"{values.shown(name)} holds the id {wrong[0]}; ids are from 0 to {vocab_size - 1}")
    return words
