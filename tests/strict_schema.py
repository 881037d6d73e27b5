"""A release's BuildConfig as a strict JSON schema: every key that its data has, its type and choices, and no other."""

from typing import Any

from jsonschema import Draft202012Validator

from trtforge.formats.releases import Field, Release, Section, release

_JSON = {
    "int": "integer", "bool": "boolean", "str": "string", "null": "null", "list": "array", "dict": "object",
    "KVCacheType": "string", "SpeculativeDecodingMode": "integer", "AutoParallelConfig": "object",
}  # fmt: skip
_OBJECTS: dict[str, Section] = {"LoraConfig": "lora_config", "PluginConfig": "plugin_config"}


def build_config_schema(version: str) -> dict[str, Any]:
    """Of `build_config` with its nested plugin and LoRA configurations."""
    return _object(release(version), "build_config")


def require_build_config(version: str, values: Any) -> None:
    """Raises jsonschema's ValidationError, which names the key, for what the release would not take."""
    Draft202012Validator(build_config_schema(version)).validate(values)


def _object(target: Release, section: Section) -> dict[str, Any]:
    properties = {name: _value(target, field) for name, field in target.fields(section).items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(target: Release, field: Field) -> dict[str, Any]:
    if field.type in _OBJECTS:
        return _object(target, _OBJECTS[field.type])
    schema: dict[str, Any] = {"type": [_JSON[name.partition("[")[0]] for name in field.type.split("|")]}
    if field.choices is not None:
        schema["enum"] = list(field.choices)
    return schema
