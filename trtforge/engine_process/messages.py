"""Requests and outputs as parts of frames.

Token ids travel as int32, embedding biases and the logits of draft tokens as float32, and adapters and prompt tables as
they are, in the payload; all else is JSON.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from trtforge.engine_process.context_phase import ContextPhase
from trtforge.engine_process.ended_requests import Counted
from trtforge.engine_process.frames import BadFrame, Frame
from trtforge.engine_process.requests import (
    DEFAULT_PRIORITY,
    Beam,
    BeamParams,
    DraftTokens,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    Guide,
    LookaheadSizes,
    Output,
    PromptLogProbs,
    PromptTable,
    RequestFailure,
    SamplingParams,
    SentAdapter,
    TopLogProbs,
)
from trtforge.engine_process.retention import retention_of_row, retention_row

_COUNTED: tuple[Counted, ...] = get_args(Counted)
_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


@dataclass(frozen=True)
class Submission:
    """Sequences that are admitted or refused together. `copy_of` of a request is an index in `requests`.

    `timeout`: seconds until an unfinished sequence ends with DEADLINE_EXCEEDED; None is no limit. Sequence names are
    consecutive integers from `first` on, unique to the client. Decoded requests have their names as request ids.
    `counted`: which of its ends the metrics count.
    """

    requests: tuple[GenerationRequest, ...]
    timeout: float | None = None
    first: int = 0
    counted: Counted = "all"

    @property
    def size(self) -> int:
        """Bytes of all its sequences in the channel."""
        return sum(map(size_of, self.requests))

    def encode(self) -> Frame:
        """The frame that asks for these sequences."""
        payload = bytearray()
        rows: list[dict[str, Any]] = []
        for name, request in enumerate(self.requests, start=self.first):
            if self._is_copy(request):
                rows.append({"id": name, "copy_of": int(request.copy_of or 0), "seed": request.sampling.seed})
                continue
            bias = array("f", request.sampling.embedding_bias)
            sampling = {key: value for key, value in vars(request.sampling).items() if value != _DEFAULTS[key]}
            sampling.pop("embedding_bias", None)
            rows.append(
                {
                    "id": name,
                    "prompt": len(request.prompt),
                    "bias": len(bias),
                    "max_tokens": request.max_tokens,
                    "sampling": sampling,
                    "end_ids": sorted(request.end_ids),
                    "stop_words": request.stop_words,
                    "bad_words": request.bad_words,
                    **({"guide": (request.guide.kind, request.guide.text)} if request.guide is not None else {}),
                    **({"copy_of": int(request.copy_of)} if request.copy_of is not None else {}),
                    **({"beams": vars(request.beams)} if request.beams is not None else {}),
                    **({"lora": request.lora_task_id} if request.lora_task_id is not None else {}),
                    **({"logits": _logits_of(request)} if any(_logits_of(request)) else {}),
                    **({"priority": request.priority} if request.priority != DEFAULT_PRIORITY else {}),
                    **({"lookahead": vars(request.lookahead)} if request.lookahead is not None else {}),
                    **({"streamed": False} if not request.streamed else {}),
                    **({"retention": retention_row(kept)} if (kept := request.kv_retention) is not None else {}),
                    **({"salt": request.cache_salt} if request.cache_salt is not None else {}),
                    **({"adapter": _shape_of(sent)} if (sent := request.sent_adapter) is not None else {}),
                    **({"drafts": _sizes_of(drafts)} if (drafts := request.drafts) is not None else {}),
                    **({"table": _table_shape(table)} if (table := request.prompt_table) is not None else {}),
                    **({"context_only": True} if request.context_only else {}),
                    **({"context": vars(phase)} if (phase := request.context_phase) is not None else {}),
                }
            )
            payload += array("i", request.prompt).tobytes() + bias.tobytes()
            payload += sent.weights if sent is not None else b""
            payload += array("i", drafts.tokens).tobytes() + drafts.logits if drafts is not None else b""
            payload += table.data if table is not None else b""
        header = {"type": "submit", "timeout": self.timeout, "counted": self.counted, "requests": rows}
        return Frame(header, bytes(payload))

    @classmethod
    def decode(cls, frame: Frame) -> "Submission":
        """The inverse of `encode`. Raises BadFrame."""
        requests: list[GenerationRequest] = []
        start = 0
        try:
            for row in frame.header["requests"]:
                if "seed" in row:
                    requests.append(_copy(requests[row["copy_of"]], row))
                    continue
                prompt, start = _numbers(frame.payload, "i", start, row["prompt"])
                bias, start = _numbers(frame.payload, "f", start, row["bias"])
                sent, start = _adapter(frame.payload, start, row["adapter"]) if "adapter" in row else (None, start)
                drafts, start = _drafts(frame.payload, start, row["drafts"]) if "drafts" in row else (None, start)
                table, start = _table(frame.payload, start, row["table"]) if "table" in row else (None, start)
                of_context, of_generation = row.get("logits", (False, False))
                requests.append(
                    GenerationRequest(
                        request_id=str(int(row["id"])),
                        prompt=tuple(prompt),
                        max_tokens=row["max_tokens"],
                        sampling=SamplingParams(**row["sampling"], embedding_bias=bias),
                        end_ids=frozenset(row["end_ids"]),
                        stop_words=tuple(map(tuple, row["stop_words"])),
                        bad_words=tuple(map(tuple, row["bad_words"])),
                        guide=Guide(*row["guide"]) if "guide" in row else None,
                        copy_of=str(int(row["copy_of"])) if "copy_of" in row else None,
                        beams=BeamParams(**row["beams"]) if "beams" in row else None,
                        lora_task_id=row.get("lora"),
                        context_logits=bool(of_context),
                        generation_logits=bool(of_generation),
                        priority=float(row.get("priority", DEFAULT_PRIORITY)),
                        lookahead=LookaheadSizes(**row["lookahead"]) if "lookahead" in row else None,
                        sent_adapter=sent,
                        streamed=bool(row.get("streamed", True)),
                        drafts=drafts,
                        prompt_table=table,
                        kv_retention=retention_of_row(row["retention"]) if "retention" in row else None,
                        cache_salt=row.get("salt"),
                        context_only=bool(row.get("context_only", False)),
                        context_phase=_phase(row["context"]) if "context" in row else None,
                    )
                )
            timeout = frame.header.get("timeout")
            seconds = None if timeout is None else float(timeout)
            counted: Counted = _COUNTED[_COUNTED.index(frame.header.get("counted", "all"))]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadFrame(f"a request that cannot be read: {error!r}") from None
        first = int(requests[0].request_id) if requests else 0
        return cls(tuple(requests), seconds, first, counted)

    def _is_copy(self, request: GenerationRequest) -> bool:
        """Whether a request differs from its original only in its seed, so that nothing else needs to be sent again."""
        if request.copy_of is None:
            return False
        original = self.requests[int(request.copy_of)]
        own = _copy(original, {"id": 0, "copy_of": request.copy_of, "seed": request.sampling.seed})
        return replace(request, request_id=own.request_id) == own


def _copy(original: GenerationRequest, row: Mapping[str, Any]) -> GenerationRequest:
    """A request that differs from its original in its seed. A sent adapter came with the original."""
    sampling = replace(original.sampling, seed=row["seed"])
    name, of = str(int(row["id"])), str(int(row["copy_of"]))
    return replace(original, request_id=name, copy_of=of, sampling=sampling, sent_adapter=None)


def _logits_of(request: GenerationRequest) -> tuple[bool, bool]:
    return request.context_logits, request.generation_logits


def _shape_of(adapter: SentAdapter) -> dict[str, Any]:
    """The header's entry for an adapter, whose weights are in the payload."""
    shape = {"config": adapter.config, "dtype": adapter.dtype, "width": adapter.width}
    return {**shape, "bytes": len(adapter.weights)}


def _adapter(data: bytes, start: int, shape: Mapping[str, Any]) -> tuple[SentAdapter, int]:
    end = start + int(shape["bytes"])
    if not start <= end <= len(data):
        raise ValueError("the payload is too short")
    config = tuple(tuple(map(int, row)) for row in shape["config"])
    return SentAdapter(config, shape["dtype"], int(shape["width"]), data[start:end]), end


def size_of(request: GenerationRequest) -> int:
    """Bytes that its tokens, biases, draft tokens, guide and prompt table take in the channel."""
    size = 4 * (len(request.prompt) + len(request.sampling.embedding_bias))
    if request.guide is not None:
        size += len(request.guide.text)
    if request.drafts is not None:
        size += 4 * len(request.drafts.tokens) + len(request.drafts.logits)
    if request.prompt_table is not None:
        size += len(request.prompt_table.data)
    return size


def _sizes_of(drafts: DraftTokens) -> dict[str, Any]:
    """The header's entry for draft tokens, which are in the payload with their logits."""
    sizes = {"tokens": len(drafts.tokens), "bytes": len(drafts.logits)}
    return {**sizes, "threshold": drafts.threshold, "alone": drafts.alone}


def _drafts(data: bytes, start: int, sizes: Mapping[str, Any]) -> tuple[DraftTokens, int]:
    tokens, start = _numbers(data, "i", start, int(sizes["tokens"]))
    end = start + int(sizes["bytes"])
    if not start <= end <= len(data):
        raise ValueError("the payload is too short")
    return DraftTokens(tuple(tokens), data[start:end], float(sizes["threshold"]), bool(sizes["alone"])), end


def _table_shape(table: PromptTable) -> dict[str, Any]:
    """The header's entry for a prompt table, whose numbers are in the payload."""
    shape = {"rows": table.rows, "width": table.width, "dtype": table.dtype, "extra": table.extra_ids}
    return {**shape, "bytes": len(table.data)}


def _table(data: bytes, start: int, shape: Mapping[str, Any]) -> tuple[PromptTable, int]:
    end = start + int(shape["bytes"])
    if not start <= end <= len(data):
        raise ValueError("the payload is too short")
    extra = tuple(map(int, shape["extra"]))
    return PromptTable(int(shape["rows"]), int(shape["width"]), shape["dtype"], data[start:end], extra), end


def _phase(row: Mapping[str, Any]) -> ContextPhase:
    return ContextPhase(**{**row, "top": tuple((int(token), float(value)) for token, value in row["top"])})


def _numbers(data: bytes, kind: str, start: int, count: int) -> "tuple[array[Any], int]":
    numbers: array[Any] = array(kind)
    end = start + count * numbers.itemsize
    if count < 0 or end > len(data):
        raise ValueError("the payload is too short")
    numbers.frombytes(data[start:end])
    return numbers, end


@dataclass(slots=True)
class Update:
    """The output of one sequence since its last update: tokens of one or several steps."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cumulative_log_prob: float = 0.0
    reused_blocks: int = 0
    allocated_blocks: int = 0
    cached_tokens: int | None = None
    failure: RequestFailure | None = None
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: PromptLogProbs | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    beams: Sequence[Beam] = ()
    context_logits: bytearray = field(default_factory=bytearray)
    generation_logits: bytearray = field(default_factory=bytearray)
    scheduled_ns: int = 0

    def add(self, later: "Output | Update") -> None:
        """Append an output, or all but the failure of a later update."""
        self.tokens += later.tokens
        self.log_probs += later.log_probs
        self.finish_reason = later.finish_reason
        self.cumulative_log_prob = later.cumulative_log_prob
        self.reused_blocks, self.allocated_blocks = later.reused_blocks, later.allocated_blocks
        self.cached_tokens = later.cached_tokens
        self.top_log_probs += later.top_log_probs
        self.prompt_log_probs = self.prompt_log_probs or later.prompt_log_probs
        self.drafted_tokens, self.accepted_tokens = later.drafted_tokens, later.accepted_tokens
        self.beams = later.beams
        self.context_logits += later.context_logits
        self.generation_logits += later.generation_logits
        self.scheduled_ns = later.scheduled_ns

    def merge(self, later: "Update") -> None:
        """Append a later update."""
        self.add(later)
        self.failure = later.failure


def encode_updates(updates: Mapping[int, Update]) -> Frame:
    """One frame with the updates of a client's sequences; its payload are their logits, one after another."""
    rows: list[Sequence[object]] = []
    payload = bytearray()
    for name, update in updates.items():
        if update.failure is not None:
            failure = (update.failure.code, update.failure.message)
            rows.append((name, update.tokens, update.finish_reason, 0.0, 0, 0, None, (), failure))
        else:
            rows.append(
                (
                    name,
                    update.tokens,
                    update.finish_reason,
                    update.cumulative_log_prob,
                    update.reused_blocks,
                    update.allocated_blocks,
                    update.cached_tokens,
                    update.log_probs,
                    *_details(update),
                )
            )
            payload += update.context_logits + update.generation_logits
    return Frame({"type": "updates", "rows": rows}, bytes(payload))


def _details(update: Update) -> Sequence[object]:
    """The end of a row, empty for most updates.

    Otherwise: no failure, log probabilities, counts of drafts, beams, the bytes of both kinds of logits in the payload,
    and with the last update the time when the sequence first ran.
    """
    prompt, drafted = update.prompt_log_probs, update.drafted_tokens
    logits = len(update.context_logits), len(update.generation_logits)
    ended = update.finish_reason is not None
    if not (ended or update.top_log_probs or prompt is not None or drafted or update.beams or any(logits)):
        return ()
    scores = None if prompt is None else (prompt.values, prompt.top)
    beams = [(list(b.tokens), list(b.log_probs), b.cumulative_log_prob, b.finish_reason) for b in update.beams]
    scheduled = update.scheduled_ns if ended else 0
    return (None, update.top_log_probs, scores, drafted, update.accepted_tokens, beams, logits, scheduled)


def decode_updates(frame: Frame) -> dict[int, Update]:
    """The inverse of `encode_updates`. Raises BadFrame."""
    updates, start = {}, 0
    try:
        for name, tokens, reason, cumulative, reused, allocated, cached, log_probs, *more in frame.header["rows"]:
            update = Update(tokens, log_probs, reason, cumulative, reused, allocated, cached)
            if more and more[0] is not None:
                update.failure = RequestFailure(ErrorCode(more[0][0]), more[0][1])
            elif more:
                update.top_log_probs = more[1]
                update.prompt_log_probs = None if more[2] is None else PromptLogProbs(*more[2])
                update.drafted_tokens, update.accepted_tokens = more[3], more[4]
                update.beams = [Beam(*beam) for beam in more[5]]
                middle = start + int(more[6][0])
                end = middle + int(more[6][1])
                update.context_logits = bytearray(frame.payload[start:middle])
                update.generation_logits = bytearray(frame.payload[middle:end])
                start = end
                update.scheduled_ns = int(more[7])
            updates[int(name)] = update
    except (KeyError, TypeError, ValueError) as error:
        raise BadFrame(f"updates that cannot be read: {error!r}") from None
    return updates
