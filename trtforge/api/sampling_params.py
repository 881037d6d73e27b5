"""The options of a request of the Python API, checked and converted for the engine."""

import json
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from math import inf
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from trtforge.core.errors import RequestError, first_line
from trtforge.core.reasoning import NewReader, ReasoningParser, reader_of
from trtforge.engine_process.context_phase import ContextPhase
from trtforge.engine_process.requests import (
    DEFAULT_PRIORITY,
    MOST_DIVERSITY_RATE,
    MOST_LENGTH_PENALTY,
    BeamParams,
    DraftTokens,
    Guide,
    LogitsProcessor,
)
from trtforge.engine_process.requests import SamplingParams as EngineSampling
from trtforge.engine_process.retention import LONGEST_SALT, KvCacheRetention

_MOST_SEQUENCES = 128
MOST_ID = 2**31 - 1
"""The largest token id of any vocabulary."""


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """Options of a request: greedy unless `top_k` or `top_p` is given, as in TensorRT-LLM.

    `seed` None counts as 0, so that equal requests get equal tokens. `stop`: the text ends before the first of these;
    `stop_token_ids`: tokens that end the answer like the model's own end tokens, not affected by `ignore_end`; `bad`:
    words that are not generated, with or without a leading space, unless split into other tokens than the tokenizer's.
    `log_probs`: score each token, with `top_log_probs` alternatives. `json_schema` (a schema, such as a pydantic
    class's `model_json_schema()`, or its JSON text), `regex` or `grammar` (EBNF, with a rule root): the required form
    of the answer, enforced with the package xgrammar. `prompt_log_probs`: score the prompt's tokens too. `logit_bias`:
    numbers to add to the logits of these token ids; minus infinity excludes a token. After each token, `top_p` is
    multiplied by `top_p_decay`, down to `top_p_min`; after the token `top_p_reset_id`, it returns to its first value.
    `min_p`: tokens less likely than this share of the most likely one are not sampled. `no_repeat_ngram_size`: no
    n-gram of this size occurs twice. `prompt_ignore_length`: this many first tokens of the prompt count only for the
    repetition penalty.

    `adapter`: name of a LoRA adapter of the engine. `priority`: from 0 to 1; the waiting request with the highest
    priority runs first. `kv_retention`: how long KV blocks are kept for later prompts; `cache_salt`: they are shared
    only with requests with the same salt. `lookahead`: window, n-gram and verification set sizes, at most those of an
    engine with lookahead decoding; (1, 1, 0): no draft tokens.

    `n`: number of sequences, sampled with `seed`, `seed` + 1 and so on; with a `beam_width` above 1, the best beams of
    a beam search, which does not sample and is controlled by `length_penalty` and `early_stopping`;
    `beam_search_diversity_rate` favours continuations of worse beams. `context_logits`, `generation_logits`: return
    these logits; the engine must be compiled with these features.

    `draft_input_ids`: tokens that the answer may begin with, which the engine verifies. When tokens are sampled,
    acceptance depends on `draft_logits`, an array (draft tokens, vocabulary) from whose softmax the drafts were
    sampled, and on `draft_acceptance_threshold`.

    `logits_processor`: a function, or several in their order, with the arguments of TensorRT-LLM's `LogitsProcessor`: a
    request number, the logits (1, beams, vocabulary) of the next token, which it changes in place, the token ids
    (beams, tokens) so far, and None twice. `allotted_time_ms`: the request ends after the step in which this time has
    passed, with its tokens so far.

    `reasoning_parser`: `deepseek-r1` or `qwen3`, for models that think first: text before `</think>` is the `reasoning`
    of an answer and not part of its text, as with `trtforge serve`. They differ for prompts other than Chat, whose end
    does not tell whether the answer begins with reasoning: with `deepseek-r1` it does. Guided answers have no
    reasoning; chats with gpt-oss need no parser.

    `context_only`: compute the prompt and the first token for another engine. That engine continues with the answer's
    `context_phase` as option `context_phase`, the same prompt and options, and the same `kv_cache_dir`.
    """

    max_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: Sequence[str] = ()
    bad: Sequence[str] = ()
    ignore_end: bool = False
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    logit_bias: Mapping[int, Annotated[float, Field(lt=inf)]] | None = None
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    adapter: str | None = None
    priority: float = DEFAULT_PRIORITY
    lookahead: tuple[int, int, int] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_SEQUENCES)] = 1
    beam_width: Annotated[int, Field(ge=1)] = 1
    length_penalty: Annotated[float, Field(ge=-MOST_LENGTH_PENALTY, le=MOST_LENGTH_PENALTY)] = 0.0
    early_stopping: bool = True
    beam_search_diversity_rate: Annotated[float, Field(ge=0, le=MOST_DIVERSITY_RATE)] = 0.0
    context_logits: bool = False
    generation_logits: bool = False
    draft_input_ids: Sequence[Annotated[int, Field(ge=0, le=MOST_ID)]] = ()
    draft_logits: Any = None
    draft_acceptance_threshold: float = 0.0
    kv_retention: KvCacheRetention | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = None
    logits_processor: Callable[..., None] | Sequence[Callable[..., None]] = ()
    allotted_time_ms: Annotated[int, Field(ge=1)] | None = None
    min_p: float = 0.0
    no_repeat_ngram_size: int = 0
    prompt_ignore_length: int = 0
    reasoning_parser: ReasoningParser | None = None
    context_only: bool = False
    context_phase: Annotated[bytes, Field(strict=True)] | None = None
    stop_token_ids: Sequence[Annotated[int, Field(ge=0, le=MOST_ID)]] = ()

    def __repr__(self) -> str:
        """The options that differ from the defaults."""
        given = []
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not type(each.default) or value != each.default:
                given.append(f"{each.name}={value!r}")
        return f"SamplingParams({', '.join(given)})"

    def guide(self) -> Guide | None:
        """The given guide. Raises RequestError for several, and for a schema that is not JSON."""
        schema = self.json_schema
        given = [
            guide
            for guide in (
                None
                if schema is None
                else Guide("json_schema", schema if isinstance(schema, str) else _as_json(schema)),
                None if self.regex is None else Guide("regex", self.regex),
                None if self.grammar is None else Guide("ebnf_grammar", self.grammar),
            )
            if guide is not None
        ]
        if len(given) > 1:
            raise RequestError(
                "more than one of json_schema, regex and grammar is given", hint="An answer follows one of them."
            )
        return given[0] if given else None

    def new_reader(self, functions: Collection[str] | None) -> NewReader | None:
        """Creates readers that separate the reasoning of answers; None for guided answers, which follow the guide from
        the first token.

        `functions`: those that a chat may call; None: the prompt is not a chat.
        """
        if self.guide() is not None or (functions is None and self.reasoning_parser is None):
            return None
        return partial(reader_of, self.reasoning_parser, functions or ())

    def beams(self) -> BeamParams | None:
        """The requested beam search; None without."""
        if self.beam_width == 1:
            return None
        how = self.length_penalty, self.early_stopping, self.beam_search_diversity_rate
        return BeamParams(self.beam_width, self.n, *how)

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """The logits processors in their order."""
        given = self.logits_processor
        return (given,) if callable(given) else tuple(given)

    def phase(self) -> ContextPhase | None:
        """The context phase computed by another engine. Raises RequestError."""
        return None if self.context_phase is None else ContextPhase.decode(self.context_phase)

    def end_ids(self, own: frozenset[int], vocabulary: int) -> frozenset[int]:
        """The tokens that end the answer; `own`: the model's. Raises RequestError for ids beyond the vocabulary."""
        beyond = next((token for token in self.stop_token_ids if token >= vocabulary), None)
        if beyond is not None:
            raise RequestError(
                f"stop_token_ids has {beyond}, the vocabulary has {vocabulary} tokens", hint="Leave it out."
            )
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_end else own)

    def drafts(self, vocabulary: int) -> DraftTokens | None:
        """The given draft tokens. Raises RequestError for logits of another shape."""
        tokens, logits, threshold = self.draft_input_ids, self.draft_logits, self.draft_acceptance_threshold
        if not tokens:
            if logits is None and not threshold:
                return None
            raise RequestError(
                "draft_input_ids is empty", hint="Give the draft tokens, or leave out their logits and threshold."
            )
        return DraftTokens(tuple(tokens), _float32(logits, (len(tokens), vocabulary)), threshold)

    def sampling(self, vocabulary: int) -> EngineSampling:
        """The sampler's part. Raises RequestError for a bias of a token beyond the vocabulary."""
        return EngineSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            return_log_probs=self.log_probs or self.top_log_probs > 0,
            top_log_probs=self.top_log_probs,
            prompt_log_probs=self.prompt_log_probs,
            embedding_bias=_dense(self.logit_bias, vocabulary),
            top_p_decay=self.top_p_decay,
            top_p_min=self.top_p_min,
            top_p_reset_id=self.top_p_reset_id,
            min_p=self.min_p,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            prompt_ignore_length=self.prompt_ignore_length,
        )


def _dense(logit_bias: Mapping[int, float] | None, vocabulary: int) -> Sequence[float]:
    """A bias for each token of the vocabulary, or empty."""
    if not logit_bias:
        return ()
    bias = array("f", bytes(4 * vocabulary))
    for token, value in logit_bias.items():
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"logit_bias has token {token}",
                hint=f"Give ids of the vocabulary, from 0 to {vocabulary - 1}.",
            )
        bias[token] = value
        if bias[token] == inf:
            hint = "Give a number that float32 holds, or minus infinity to exclude the token."
            raise RequestError(f"logit_bias of token {token} is {value:g}", hint=hint)
    return bias


def _float32(logits: Any, shape: tuple[int, int]) -> bytes:
    """The numbers of an array of this shape as float32 bytes; empty for None."""
    if logits is None:
        return b""
    import numpy as np

    try:
        found = np.asarray(logits, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"draft_logits is not an array: {first_line(error)}", hint=f"Give numbers {shape}."
        ) from None
    if found.shape != shape:
        raise RequestError(f"draft_logits has the shape {found.shape}", hint=f"Give one of {shape}.")
    return found.tobytes()


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Give what JSON has: mappings, lists, text, numbers, true, false and null."
        raise RequestError(f"json_schema is not JSON: {error}", hint=hint) from None


_PARAMS = TypeAdapter(SamplingParams)


def checked(params: object) -> SamplingParams:
    """The options with values of their types. Raises RequestError for others."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{params!r:.60} is not a SamplingParams", hint="Give SamplingParams(max_tokens=32).")
    try:
        kept = params.kv_retention
        given = {"kv_retention": asdict(kept)} if isinstance(kept, KvCacheRetention) else {}  # to check its values
        found = _PARAMS.validate_python(vars(params) | given)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0]) if wrong["loc"] else "SamplingParams"
        raise RequestError(
            f"{name} is {getattr(params, name, None)!r:.60}", hint=f"{wrong['msg']}: see trtforge.SamplingParams."
        ) from None
    for name, words in (("stop text", found.stop), ("bad word", found.bad)):
        if not all(words):
            raise RequestError(f"a {name} is empty", hint="Leave it out.")
    if found.n > 1 and (found.context_only or found.context_phase is not None):
        hint = "Set n to 1, or leave out context_only and context_phase."
        raise RequestError(f"n is {found.n}, but a context or generation phase has one sequence", hint=hint)
    if 1 < found.beam_width < found.n:
        raise RequestError(
            f"n is {found.n}, more than beam_width {found.beam_width}", hint="Set n to at most beam_width."
        )
    return found
