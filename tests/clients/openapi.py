"""An OpenAPI document of the gateway's POST endpoints, made of the request types of the package `openai`."""

from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completion
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Response
from pydantic import TypeAdapter

_REFUSED = ("previous_response_id", "conversation", "prompt", "context_management", "moderation")
"""Fields that are always refused: a request with one of them would test nothing else."""
_REFERENCES = "#/components/schemas/{model}"


def document() -> dict[str, Any]:
    """The document; every response but a failure of the server is described."""
    schemas: dict[str, Any] = {}
    paths = {}
    for path, kind, limit in (
        ("/chat/completions", Chat, "max_tokens"),
        ("/completions", Completion, "max_tokens"),
        ("/responses", Response, "max_output_tokens"),
    ):
        schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCES)
        schemas |= schema.pop("$defs", {})
        schema["properties"][limit] = {"type": "integer", "minimum": 1, "maximum": 8}
        for name in ("max_completion_tokens", *_REFUSED):
            schema["properties"].pop(name, None)
        schema["properties"]["model"] = {"enum": ["ensemble"]}
        content = {"application/json": {"schema": schema}}
        answers = {status: {"description": status} for status in ("200", "400", "413", "429")}
        paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI's API", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
