"""The object of /v1/responses, its items and their parts, in OpenAI's format."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from trtforge.gateway.errors import ApiError
from trtforge.gateway.generation import Usage
from trtforge.gateway.request import TokenScore, scores_shown
from trtforge.gateway.tool_calls import ToolCall

Item: TypeAlias = dict[str, object]
Status = Literal["in_progress", "completed", "incomplete"]
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseObject:
    """The stages of one response: begun, ended, failed. `shown`: the request's fields that it repeats."""

    def __init__(self, model: str, shown: Mapping[str, object]) -> None:
        self._head = {"id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._shown = shown

    def begun(self) -> Mapping[str, object]:
        """The response without output."""
        return self._at("in_progress", ())

    def ended(self, status: Status, output: Sequence[Item], usage: Usage | None) -> Mapping[str, object]:
        """The response with all output. `usage` None: the backend does not count tokens."""
        found = self._at(status, output) | {"usage": None if usage is None else _usage(usage)}
        if status == "completed":
            return found | {"completed_at": int(time.time())}
        return found | {"incomplete_details": {"reason": "max_output_tokens"}}

    def failed(self, error: ApiError, output: Sequence[Item]) -> Mapping[str, object]:
        """The response that ended with an error."""
        code = _ERROR_CODES.get(error.status, "server_error")
        return self._at("failed", output) | {"error": {"code": code, "message": error.message}}

    def _at(self, status: Status | Literal["failed"], output: Sequence[Item]) -> dict[str, object]:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": list(output),
            "usage": None,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **self._shown,
        }


def new_id(prefix: str) -> str:
    """A random id."""
    return f"{prefix}_{os.urandom(24).hex()}"


def message_item(identity: str, parts: Sequence[Item], status: Status) -> Item:
    """A message item."""
    return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": list(parts)}


def reasoning_item(identity: str, texts: Sequence[str], status: Status) -> Item:
    """A reasoning item, which precedes a message or call."""
    content = [reasoning_part(text) for text in texts]
    return {"id": identity, "type": "reasoning", "status": status, "summary": [], "content": content}


def reasoning_part(text: str) -> Item:
    """The text part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, scores: Sequence[TokenScore]) -> Item:
    """The text part of a message, with the scores of its tokens if requested."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores_shown(scores)}


def call_item(identity: str, call_id: str, call: ToolCall, status: Status) -> Item:
    """A function call item. `call_id`: the id that the call's result refers to."""
    ids = {"id": identity, "type": "function_call", "status": status, "call_id": call_id}
    return {**ids, "name": call.name, "arguments": call.arguments}


def _usage(usage: Usage) -> Mapping[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
