"""An OpenAPI document of the gateway's POST endpoints, made of the request types of the package `openai`."""

from typing import Any

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completion
from pydantic import TypeAdapter

_REFERENCES = "#/components/schemas/{model}"


def document() -> dict[str, Any]:
    """The document; every response but a failure of the server is described."""
    schemas: dict[str, Any] = {}
    paths = {}
    for path, kind in (("/chat/completions", Chat), ("/completions", Completion)):
        schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCES)
        schemas |= schema.pop("$defs", {})
        schema["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 8}
        schema["properties"].pop("max_completion_tokens", None)
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
