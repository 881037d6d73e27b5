"""Answers in OpenAI's format: whole, and as events of a stream.

They are written directly as JSON text: a stream has an event for every few tokens, and validating each with the classes
of `openai.types` would take longer than sending it. Tests parse each kind of answer strictly with these classes.
"""

import codecs
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trtforge.gateway.call_output import CallDelta
from trtforge.gateway.errors import ApiError
from trtforge.gateway.generation import Choice, Usage
from trtforge.gateway.request import TokenScore, TopToken, scores_shown
from trtforge.gateway.sequence import Delta
from trtforge.gateway.tool_calls import StreamedCalls, ToolCall, new_call_id, reason_of, split
from trtforge.gateway.tools import ToolUse

_DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """The format of the answers of one endpoint."""

    def whole(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """The body of an answer that is not streamed."""

    def events(self, delta: Delta) -> bytes:
        """The server-sent events for a delta."""

    def end(self, usage: Usage | None) -> bytes:
        """The last events of a stream."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails after it began."""


class ChatAnswer:
    """/v1/chat/completions. `with_usage`: a stream ends with the usage, which is null before, as in OpenAI's API.

    `use`: how the answers may call functions.
    """

    def __init__(self, model: str, *, with_usage: bool, logprobs: bool, use: ToolUse | None = None) -> None:
        self._head = _head("chatcmpl", model)
        self._with_usage = with_usage
        self._logprobs = logprobs
        self._begin = _beginning(self._head | {"object": "chat.completion.chunk"})
        self._end = _ending(with_usage=with_usage)
        self._begun: set[int] = set()
        self._use = use
        self._calls: dict[int, StreamedCalls] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """See Answer."""
        found = []
        for index, choice in enumerate(choices):
            text, calls = self._split(choice)
            message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
            message |= {"reasoning_content": choice.reasoning} if choice.reasoning else {}
            if calls:
                message |= {"content": text or None, "tool_calls": [call.as_json() for call in calls]}
            found.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._scores(choice.logprobs),
                    "finish_reason": self._reason(choice, calls),
                }
            )
        return _encode(self._head | {"object": "chat.completion", "choices": found} | _usage(usage))

    def events(self, delta: Delta) -> bytes:
        """See Answer."""
        text = b""
        told: Sequence[str | CallDelta] = ()
        if self._use is not None:
            delta, told = self._calls.setdefault(delta.index, StreamedCalls(self._use)).take(delta)
        if delta.text or delta.reasoning or delta.logprobs or delta.index not in self._begun:
            role = "" if delta.index in self._begun else '"role":"assistant",'
            role += f'"reasoning_content":{json.dumps(delta.reasoning)},' if delta.reasoning else ""
            self._begun.add(delta.index)
            scores = json.dumps(self._scores(delta.logprobs)) if self._logprobs else "null"
            choice = (
                f'{{"index":{delta.index},"delta":{{{role}"content":{json.dumps(delta.text)}}},'
                f'"logprobs":{scores},"finish_reason":null}}'
            )
            text = self._event(choice)
        calls = [each for each in told if isinstance(each, CallDelta) and (each.name is not None or each.arguments)]
        if calls:
            listed = json.dumps([_streamed(call) for call in calls])
            text += self._event(
                f'{{"index":{delta.index},"delta":{{"tool_calls":{listed}}},"logprobs":null,"finish_reason":null}}'
            )
        if delta.finish_reason is not None:
            reason = json.dumps(delta.finish_reason)
            text += self._event(f'{{"index":{delta.index},"delta":{{}},"logprobs":null,"finish_reason":{reason}}}')
        return text

    def end(self, usage: Usage | None) -> bytes:
        """See Answer."""
        values = self._head | {"object": "chat.completion.chunk", "choices": []} | _usage(usage)
        return _data(_encode(values)) + _DONE if self._with_usage else _DONE

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return _data(error.body())

    def _split(self, choice: Choice) -> tuple[str, Sequence[ToolCall]]:
        if self._use is None:
            return choice.text, ()
        return split(self._use, choice.text, choice.finish_reason, choice.stop_word)

    def _reason(self, choice: Choice, calls: Sequence[ToolCall]) -> str:
        if self._use is None:
            return choice.finish_reason
        cut, stopped = bool(calls) and not calls[-1].complete, bool(choice.stop_word)
        return reason_of(self._use, choice.finish_reason, calls=bool(calls), cut=cut, stopped=stopped)

    def _event(self, choice: str) -> bytes:
        return f"data: {self._begin}{choice}{self._end}\n\n".encode()

    def _scores(self, scores: Sequence[TokenScore]) -> Mapping[str, object] | None:
        if not self._logprobs:
            return None
        return {"content": scores_shown(scores), "refusal": None}


class CompletionAnswer:
    """/v1/completions. `echo`: answers begin with their prompts (`set_prompt`); `nothing_new`: they are only that."""

    def __init__(self, model: str, *, with_usage: bool, logprobs: int | None, echo: bool, nothing_new: bool) -> None:
        self._head = _head("cmpl", model) | {"object": "text_completion"}
        self._begin = _beginning(self._head)
        self._end = _ending(with_usage=with_usage)
        self._with_usage = with_usage
        self._logprobs = logprobs
        self._echo = echo
        self._nothing_new = nothing_new
        self._scores: dict[int, CompletionScores] = {}
        self._prompts: dict[int, tuple[str | None, Sequence[TokenScore]]] = {}

    def set_prompt(self, index: int, text: str | None, scores: Sequence[TokenScore]) -> None:
        """Set the prompt of a choice before its first event. `text` None: token ids, whose text follows from the
        scores."""
        if index not in self._prompts:
            self._prompts[index] = (text, scores)

    def whole(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """See Answer."""
        found = []
        for index, choice in enumerate(choices):
            text, scores = self._with_prompt(index, choice.text, choice.logprobs)
            found.append(
                {
                    "index": index,
                    "text": text,
                    "logprobs": self._scores_of(index, scores),
                    "finish_reason": "length" if self._nothing_new else choice.finish_reason,
                }
            )
        return _encode(self._head | {"choices": found} | _usage(usage))

    def events(self, delta: Delta) -> bytes:
        """See Answer."""
        text, scores = self._with_prompt(delta.index, delta.text, delta.logprobs)
        reason = "length" if self._nothing_new and delta.finish_reason is not None else delta.finish_reason
        if not text and not scores and reason is None:
            return b""
        logprobs = json.dumps(self._scores_of(delta.index, scores)) if scores else "null"
        choice = (
            f'{{"index":{delta.index},"text":{json.dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":{json.dumps(reason)}}}'
        )
        return f"data: {self._begin}{choice}{self._end}\n\n".encode()

    def end(self, usage: Usage | None) -> bytes:
        """See Answer."""
        values = self._head | {"choices": []} | _usage(usage)
        return _data(_encode(values)) + _DONE if self._with_usage else _DONE

    def failure(self, error: ApiError) -> bytes:
        """See Answer."""
        return _data(error.body())

    def _with_prompt(self, index: int, text: str, scores: Sequence[TokenScore]) -> tuple[str, Sequence[TokenScore]]:
        """Text and scores; the first ones of a choice are preceded by those of the prompt."""
        if self._nothing_new:
            text, scores = "", ()
        if not self._echo or index in self._scores:
            return text, scores
        prompt, prompt_scores = self._prompts.get(index, ("", ()))
        scored = _joined(prompt_scores)
        before = scored if prompt is None else prompt
        # The scores of a text prompt begin with those of special tokens that the tokenizer added before it.
        self._scores[index] = CompletionScores(len(before) - len(scored) if scored.endswith(before) else 0)
        return before + text, [*prompt_scores, *scores] if self._logprobs is not None else ()

    def _scores_of(self, index: int, scores: Sequence[TokenScore]) -> Mapping[str, object] | None:
        if self._logprobs is None:
            return None
        return self._scores.setdefault(index, CompletionScores()).take(scores, self._logprobs)


class CompletionScores:
    """The scores of one choice in the format of /v1/completions, with each token's offset in the text.

    `start`: the first token's offset, negative if it is not part of the text.
    """

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = start

    def take(self, scores: Sequence[TokenScore], top: int) -> Mapping[str, object]:
        """The formatted scores of the next tokens."""
        offsets = []
        for score in scores:
            begun = self._decoder.getstate()[0]
            text = self._decoder.decode(bytes(score["bytes"]))
            # Bytes that do not form a character become one replacement character, before the token that reveals this.
            broken = len(begun.decode(errors="replace")) if text.startswith("\ufffd") else 0
            offsets.append(max(0, self._offset + broken))
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [score["logprob"] for score in scores],
            "tokens": [_named(score) for score in scores],
            "top_logprobs": [_alternatives(score) for score in scores] if top else None,
        }


def _streamed(call: CallDelta) -> Mapping[str, object]:
    """The new part of a call; the first one has its id and name."""
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    first = {"index": call.index, "id": new_call_id(), "type": "function"}
    return {**first, "function": {"name": call.name, **function}}


def _named(token: TokenScore | TopToken) -> str:
    """A token's text; its bytes in OpenAI's notation if they are only a part of a character."""
    try:
        return bytes(token["bytes"]).decode() or token["token"]
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])


def _alternatives(score: TokenScore) -> Mapping[str, float]:
    """The likely tokens at one position, including the chosen one; empty for the first token of a prompt."""
    if score["logprob"] is None:
        return {}
    found: dict[str, float] = {}
    for token in _top(score):
        found.setdefault(_named(token), token["logprob"])
    found.setdefault(_named(score), score["logprob"])
    return found


def _top(score: TokenScore) -> Sequence[TopToken]:
    return score.get("top_logprobs") or ()


def _joined(scores: Sequence[TokenScore]) -> str:
    return b"".join(bytes(score["bytes"]) for score in scores).decode(errors="replace")


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{os.urandom(12).hex()}", "created": int(time.time()), "model": model}


def _beginning(head: Mapping[str, object]) -> str:
    return f'{json.dumps(head, separators=(",", ":"))[:-1]},"choices":['


def _ending(*, with_usage: bool) -> str:
    return '],"usage":null}' if with_usage else "]}"


def _usage(usage: Usage | None) -> dict[str, object]:
    """The usage; empty if the backend does not count tokens."""
    if usage is None:
        return {}
    cached = usage.cached_tokens
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
        }
    }


def _data(event: bytes) -> bytes:
    return b"data: " + event + b"\n\n"


def _encode(values: Mapping[str, object]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()
