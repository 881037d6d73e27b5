"""Disaggregated serving: the data that a server of the context phase passes to the server that generates the answer.

TensorRT-LLM's ContextPhaseParams (cpp/include/tensorrt_llm/executor/executor.h, 1.3.0rc3) are the first tokens and the
location of the keys and values, in TensorRT-LLM's private serialisation. These are JSON: the first token, and a digest
that shows that both servers got the same prompt, adapter and prompt table. Keys and values are looked up by their
tokens (`runtime/kv_store.py`).
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, get_args

from trtforge.core.errors import ForgeError, RequestError
from trtforge.core.json_text import parse_json

if TYPE_CHECKING:
    from trtforge.engine_process.requests import GenerationRequest, PromptTable, TopLogProbs

RequestType = Literal["context_and_generation", "context_only", "generation_only"]
"""TensorRT-LLM's names, as its Triton backend reads them from a request's parameter `request_type`."""
REQUEST_TYPES: tuple[RequestType, ...] = get_args(RequestType)
_FORMAT = 1
_LONGEST = 4096  # bytes; 20 alternatives of the first token take some 800
_LARGEST = 3.4e38  # of float32
_HINT = "Pass on what the context_only request returned, unchanged."


@dataclass(frozen=True)
class ContextPhase:
    """The first token of an answer, whose prompt another server computed. `prompt`: `request_digest` of its request.

    `log_prob` and `top`: of the first token and of the most likely tokens at its position; None and empty if not
    requested.
    """

    first_token: int
    prompt: str
    log_prob: float | None = None
    top: Sequence[tuple[int, float]] = ()

    def encode(self) -> bytes:
        """The form for clients: JSON in UTF-8."""
        values = {"version": _FORMAT, "first_gen_tokens": [self.first_token], "prompt": self.prompt}
        scores = {} if self.log_prob is None else {"log_probs": [self.log_prob], "top_log_probs": list(self.top)}
        return json.dumps({**values, **scores}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> "ContextPhase":
        """The inverse of `encode`. Raises RequestError."""
        if len(data) > _LONGEST:
            raise RequestError(f"context_phase_params has {len(data)} bytes, at most {_LONGEST} are read", hint=_HINT)
        try:
            return cls.of_values(parse_json(data, "context_phase_params", hint=_HINT))
        except ForgeError as error:
            raise RequestError(error.message, hint=_HINT) from None
        except (KeyError, TypeError, ValueError):
            message = "context_phase_params are not those of an embedded engine of this version"
            raise RequestError(message, hint=_HINT) from None

    @classmethod
    def of_values(cls, values: Any) -> "ContextPhase":
        """From the object that `encode` writes. Raises KeyError, TypeError or ValueError."""
        if values["version"] != _FORMAT:
            raise ValueError
        (token,) = values["first_gen_tokens"]
        (log_prob,) = values.get("log_probs", [None])
        top = tuple((_whole(each), _finite(value)) for each, value in values.get("top_log_probs", ()))
        return cls(_whole(token), _text(values["prompt"]), None if log_prob is None else _finite(log_prob), top)


def phase_after(
    request: "GenerationRequest", tokens: Sequence[int], log_probs: Sequence[float], top: "Sequence[TopLogProbs]"
) -> ContextPhase:
    """The context phase of a context_only request that ended with these tokens: one, or none if it is an end id.

    `log_probs`, `top`: of these tokens, if the request asked for them.
    """
    token = tokens[0] if tokens else min(request.end_ids, default=0)
    log_prob = (log_probs[0] if log_probs else 0.0) if request.sampling.return_log_probs else None
    return ContextPhase(token, request_digest(request), log_prob, top[0] if top and tokens else ())


def request_digest(request: "GenerationRequest") -> str:
    """A digest of what the keys and values of a request's prompt are computed from: `prompt_digest` of its fields."""
    return prompt_digest(request.prompt, request.lora_task_id, request.prompt_table)


def prompt_digest(prompt: Sequence[int], adapter: int | None = None, table: "PromptTable | None" = None) -> str:
    """A digest of a prompt's token ids, its LoRA adapter's task id and its prompt table; hexadecimal, 32 digits."""
    digest = blake2b(array("q", prompt).tobytes(), digest_size=16)
    if adapter is not None:
        digest.update(b"adapter %d" % adapter)
    if table is not None:
        digest.update(b"table %d %d %s" % (table.rows, table.width, table.dtype.encode()))
        digest.update(table.data)
        digest.update(repr(table.extra_ids).encode())
    return digest.hexdigest()


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _finite(value: object) -> float:
    """A number that float32 holds, too."""
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # type: ignore[arg-type]
        raise TypeError
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError
    return value
