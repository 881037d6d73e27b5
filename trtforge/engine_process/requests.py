"""Requests to an engine and their outputs. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from trtforge.core.errors import ForgeError
from trtforge.engine_process.context_phase import ContextPhase
from trtforge.engine_process.retention import KvCacheRetention

if TYPE_CHECKING:
    from torch import Tensor

    from trtforge.core.dtypes import ModelDtype


class ErrorCode(str, Enum):
    """The gRPC status of a failed request; also the first word of its error text."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True)
class RequestFailure:
    """Why a request failed."""

    code: ErrorCode
    message: str


_MOST_CANDIDATES = 1 << 10
"""The most tokens that are separated from all others as the most likely ones."""
_HIGHEST_TEMPERATURE = 100.0
"""At much higher temperatures, unequal logits get equal weights in float32, and top_k takes the first in the
vocabulary."""
FinishReason = Literal["end_id", "stop_word", "length", "cancelled", "timed_out", "error"]
CUT: tuple[FinishReason, ...] = ("cancelled", "timed_out")
"""Finish reasons of requests that were ended early, whose next token is unknown."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen: greedily with top_k 1, temperature 0, or neither top_k nor top_p.

    Names, order and defaults follow TensorRT-LLM (cpp/tensorrt_llm/kernels/penaltyKernels.cu and samplingTopKKernels):
    bias, temperature, penalties over prompt and output, then min_p, then top_k, then top_p of the top_k tokens.
    `top_log_probs`: number of most likely tokens to report beside each token, with `return_log_probs` and
    `prompt_log_probs`; the latter scores the prompt's own tokens. After each token top_p is multiplied by
    `top_p_decay`, down to `top_p_min`; after `top_p_reset_id` it is as at the beginning (computeToppDecay there).
    `min_p`: tokens less likely than this share of the most likely one are not drawn (decodingCommon.cu).
    `no_repeat_ngram_size`: no n-gram of so many tokens occurs twice in prompt and output; 0: any may.
    `prompt_ignore_length`: so many first tokens of the prompt count for the repetition penalty only.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    return_log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    embedding_bias: Sequence[float] = ()
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    min_p: float = 0.0
    no_repeat_ngram_size: int = 0
    prompt_ignore_length: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        if self.top_k == 1 or self.temperature == 0.0:
            return True
        return not self.top_k and not self.top_p

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on how often it occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def remembers(self) -> bool:
        """Whether choosing a token needs state of earlier tokens or of the request, or reports more than the token."""
        return self._alters or self.top_p_decay != 1.0

    @property
    def plain(self) -> bool:
        """Whether the token is the argmax of the unmodified logits, without log probabilities."""
        return self.greedy and not self._alters

    @property
    def candidates(self) -> int:
        """The number of most likely tokens, by the unmodified logits, among which the next one is; 0 for all.

        It is 1 if it `draws_from_all`, by the sums of logits and noise, and if it `draws_near`.
        """
        if self._alters or self.prompt_log_probs:
            return 0
        if self.greedy or self.draws_from_all or self.draws_near:
            return 1
        few = self.top_k is not None and self.top_k <= _MOST_CANDIDATES
        return (self.top_k or 0) if few and (self.temperature or 1.0) <= _HIGHEST_TEMPERATURE else 0

    @property
    def draws_from_all(self) -> bool:
        """Whether each token of the vocabulary may be next."""
        cuts = self.top_k or self.top_p != 1.0 or self.top_p_decay != 1.0 or self.min_p
        return not self.greedy and not cuts

    @property
    def draws_near(self) -> bool:
        """Whether the next token is any of those whose logits are near the largest one by min_p, however many there
        are."""
        likely = self.min_p > 0 and (self.temperature or 1.0) <= _HIGHEST_TEMPERATURE
        return likely and not self.greedy and not 0 < (self.top_k or 0) <= _MOST_CANDIDATES

    @property
    def _alters(self) -> bool:
        """Whether logits are modified but for the temperature, or log probabilities are wanted."""
        bans = self.min_tokens > 0 or self.no_repeat_ngram_size > 0
        return self.penalises or bans or len(self.embedding_bias) > 0 or self.return_log_probs


GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]
GUIDE_KINDS: tuple[GuideKind, ...] = get_args(GuideKind)
LONGEST_GUIDE = 128 << 10
"""Characters of a guide."""


@dataclass(frozen=True)
class Guide:
    """What an output must be, from its first token to its end id. `text`: the schema, expression or grammar.

    The kinds are those of `guided_decoding_guide_type` of TensorRT-LLM's Triton backend; `json` has no text.
    """

    kind: GuideKind
    text: str = ""


@dataclass(frozen=True)
class BeamParams:
    """Beam search, with TensorRT-LLM's names and defaults.

    `width`: beams that are searched, of which the best `returned` are handed out. A finished beam's score is its
    cumulative log probability / length ^ `length_penalty`. `early_stopping`: stop as soon as `width` beams are
    finished, else only when no running beam can become better than them. `diversity_rate`: how much more
    continuations of a beam get than those of the one before it, which the last step preferred, when they are compared
    with those of others.
    """

    width: int
    returned: int
    length_penalty: float = 0.0  # at most MOST_LENGTH_PENALTY, either way
    early_stopping: bool = True
    diversity_rate: float = 0.0  # at most MOST_DIVERSITY_RATE


@dataclass(frozen=True)
class SentAdapter:
    """A LoRA adapter that comes with a request: TensorRT-LLM's `lora_config` and `lora_weights` of one prompt.

    `config`: of each module its id, layer and rank, and perhaps 1 for DoRA. `weights`: (modules, width) numbers of
    `dtype`, in native byte order: A (rank, inputs), B (outputs, rank) with its scale, then anything.
    """

    config: tuple[tuple[int, ...], ...]
    dtype: "ModelDtype"
    width: int
    weights: bytes


@dataclass(frozen=True)
class PromptTable:
    """Embeddings that come with a request, TensorRT-LLM's PromptTuningConfig (cpp/include/tensorrt_llm/executor).

    Ids of the prompt from the vocabulary's size on are rows of `data`: (rows, width) numbers of `dtype`, in native byte
    order. `extra_ids`: of each token of the prompt, or none; rows with different ones share no KV blocks.
    """

    rows: int
    width: int
    dtype: "ModelDtype"
    data: bytes
    extra_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class LookaheadSizes:
    """Lookahead decoding of one request: TensorRT-LLM's LookaheadDecodingConfig. (1, 1, 0): no draft tokens.

    `window`: positions that are guessed in parallel, `ngram`: tokens of an n-gram, `verification`: n-grams that a step
    verifies.
    """

    window: int
    ngram: int
    verification: int


@dataclass(frozen=True)
class DraftTokens:
    """Tokens that a request proposes as its first ones: TensorRT-LLM's ExternalDraftTokensConfig.

    `logits`: native float32 (tokens, vocabulary), whose softmax is what each was drawn from; empty if the tokens are
    only compared. `threshold`: the least ratio of the engine's probability of a token to that of the draft at which
    the token is accepted, instead of a random number; 0 for the random number. `alone`: the request ends with the step
    that verifies them, as TensorRT-LLM's do.
    """

    tokens: tuple[int, ...]
    logits: bytes = b""
    threshold: float = 0.0
    alone: bool = False


LogitsProcessor = Callable[[int, "Tensor", list[list[int]], None, None], None]
"""Changes logits in place, as TensorRT-LLM's LogitsProcessor (tensorrt_llm/sampling_params.py, 1.0 to 1.3).

Called with a number of the request, its float32 logits (1, beams, vocabulary), the token ids of prompt and output of
each beam, and None for the stream and the client id, which the engine has not.
"""
DEFAULT_PRIORITY = 0.5


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and when to stop. An end id is not part of the output; a matched stop word is.

    `lora_task_id`: the adapter to answer with; None: the model alone. `sent_adapter`: the adapter to register under
    this id, unless it is one of the engine's own. `context_logits`, `generation_logits`: return the logits of the
    prompt's tokens, and those of the output's. `copy_of`: id of an earlier request with the same prompt, whose KV
    blocks it shares from the start if possible. `priority`: from 0 to 1, higher ones run first; range and default are
    those of TensorRT-LLM's executor::Request. `lookahead`: at most the engine's sizes, which are the default.
    `streamed`: whether the client waits for each token; if not, steps may delay the next one (`pacing.py`). `drafts`:
    proposed first tokens, which the engine verifies. `prompt_table`: embeddings of the prompt's ids beyond the
    vocabulary. `kv_retention`: how long its KV blocks are kept; None: the default. `cache_salt`: KV blocks are shared
    only among requests with the same salt; None: with requests without one. `logits_processors`: functions that change
    the logits of its tokens, in this order; only for engines in the same process. `allotted_time_ms`: time from its
    arrival after which it ends with its tokens so far, at most one step later. `context_only`: it ends with its first
    token, when the KV blocks of its prompt are stored for other engines. `context_phase`: its first token, which the
    engine that computed the prompt chose; it is part of the output.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    end_ids: frozenset[int] = frozenset()
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None
    lora_task_id: int | None = None
    beams: BeamParams | None = None
    copy_of: str | None = None
    context_logits: bool = False
    generation_logits: bool = False
    priority: float = DEFAULT_PRIORITY
    lookahead: LookaheadSizes | None = None
    sent_adapter: SentAdapter | None = None
    streamed: bool = True
    drafts: DraftTokens | None = None
    prompt_table: PromptTable | None = None
    kv_retention: KvCacheRetention | None = None
    cache_salt: str | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    allotted_time_ms: int | None = None
    context_only: bool = False
    context_phase: ContextPhase | None = None

    @property
    def most_new(self) -> int:
        """Maximum number of tokens that are generated."""
        return 1 if self.context_only else self.max_tokens


UINT64_MAX = 2**64 - 1


def with_seed(request: GenerationRequest, seed: int) -> GenerationRequest:
    """Another sequence of a request: sequences of one prompt differ in their seeds."""
    return replace(request, sampling=replace(request.sampling, seed=seed & UINT64_MAX))


MOST_LENGTH_PENALTY = 10
MOST_DIVERSITY_RATE = 1000
MOST_TOP_LOG_PROBS = 20
TopLogProbs = Sequence[tuple[int, float]]
"""The most likely tokens at one position with their log probabilities, the most likely first."""


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Natural logarithms of the probabilities of the prompt's tokens but the first, each after those before it.

    `top`: the most likely tokens at each of these positions; empty if not asked for.
    """

    values: Sequence[float]
    top: Sequence[TopLogProbs] = ()


@dataclass(frozen=True, slots=True)
class Beam:
    """One result of a beam search. `cumulative_log_prob` includes that of an end id, `log_probs` does not."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    cumulative_log_prob: float
    finish_reason: FinishReason


@dataclass(slots=True)  # made for every token: a frozen one takes three times as long to make
class Output:
    """A request's tokens from one step; its last output has a `finish_reason`.

    `prompt_log_probs` comes once, with the first token. `allocated_blocks`: KV blocks allocated to the request so far,
    `reused_blocks` included. `cached_tokens`: tokens of the prompt whose keys and values were in the KV cache; None:
    not reported. `drafted_tokens`: tokens that speculative decoding proposed and the engine verified so far;
    `accepted_tokens` of them are in the output. `beams`: of a beam search, the best first, in its only output.
    `scheduled_ns`: when its sequence first ran, in nanoseconds of `time.monotonic_ns`, which all processes of a machine
    share; 0 if it never did. `context_logits`: native float32 (tokens of the prompt, vocabulary), with the first token;
    row i predicts what follows token i. `generation_logits`: (tokens of this output, vocabulary), from which each was
    chosen. Both are the model's, before all changes by sampling options.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ForgeError | None = None
    log_probs: tuple[float, ...] = ()
    cumulative_log_prob: float = 0.0
    reused_blocks: int = 0
    allocated_blocks: int = 0
    cached_tokens: int | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: PromptLogProbs | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    beams: tuple[Beam, ...] = ()
    context_logits: bytes = b""
    generation_logits: bytes = b""
    scheduled_ns: int = 0


OnOutput = Callable[[Output], None]
"""Receives the outputs of a request."""


class RequestEngine(Protocol):
    """An engine. All methods may be called from any thread; all but `close` return at once."""

    @property
    def max_running(self) -> int:
        """Maximum number of running sequences; further ones wait."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that compute for the engine."""

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        """Start requests together, with the receiver of each one's outputs.

        Outputs come on the engine's thread; the last one of a request has a finish_reason.
        """

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        """Cancel a request; a finished one is ignored. `only_waiting`: only if it has not begun to run."""

    def ping(self, on_turn: Callable[[], None]) -> None:
        """Call `on_turn` from the engine's thread in its next loop iteration."""

    def after_steps(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` from the engine's thread after the outputs of each step."""

    def figures(self) -> dict[str, float]:
        """Current counters and gauges by name: those of EngineStatistics that the engine has, `running`, and
        `preparing`: sequences that wait for long preparations with their own limits."""

    def check(self) -> None:
        """Raises ForgeError if a process that computes for the engine has ended."""

    def close(self) -> None:
        """End the engine and its processes."""
