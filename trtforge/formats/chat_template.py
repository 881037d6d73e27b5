"""The chat template of a tokenizer directory: the Jinja text that turns messages into a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtforge.core.errors import AbsentFile, ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.reading import MIB, as_text, read_limited

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_AGAIN = "Download the file again."
_LARGEST = MIB  # the longest templates have some tens of kB


@dataclass(frozen=True)
class ChatTemplate:
    """`template`: Jinja text; `tool_template`: the template for requests with tools, if it differs.

    `special_tokens`: variables of templates, such as `bos_token`; strings or lists of strings.
    """

    template: str
    tool_template: str | None = None
    special_tokens: Mapping[str, str | list[str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The content of chat.json, which served models read."""
        return {
            "template": self.template,
            "tool_template": self.tool_template,
            "special_tokens": dict(self.special_tokens),
        }


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """The chat template of a tokenizer; None if it has none. Raises ForgeError for a damaged file.

    chat_template.jinja, and the template for tools that transformers writes beside it, take precedence over
    `chat_template` of tokenizer_config.json, which is a text or a list of named ones
    (transformers/tokenization_utils_base.py, `from_pretrained`).
    """
    config = _read(directory / _CONFIG_FILE)
    named = _named_templates(directory / _CONFIG_FILE, config.get("chat_template"))
    for name, file in (("default", TEMPLATE_FILE), ("tool_use", TOOL_TEMPLATE_FILE)):
        path = directory / file
        if path.is_file():
            named[name] = _text(path)
    template = named.get("default")
    if template is None:
        return None
    special = _read(directory / "special_tokens_map.json") | config
    return ChatTemplate(template, named.get("tool_use"), _special_tokens(special))


def _named_templates(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        named = {each.get("name"): each.get("template") for each in value}
        if all(isinstance(name, str) and isinstance(text, str) for name, text in named.items()):
            return named
    raise ForgeError(f"{path}: chat_template is neither a text nor a list of named texts", hint=_AGAIN)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str | list[str]]:
    found: dict[str, str | list[str]] = {}
    for key, value in config.items():
        if key.endswith("_token") and (text := _token(value)) is not None:
            found[key] = text
    extra = config.get("additional_special_tokens")
    if isinstance(extra, list):
        found["additional_special_tokens"] = [text for each in extra if (text := _token(each)) is not None]
    return found


def _token(value: object) -> str | None:
    """A token's text: itself, or the `content` of an AddedToken."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _text(path: Path) -> str:
    return as_text(read_limited(path, _LARGEST, hint=_AGAIN), str(path), hint=_AGAIN)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, hint=_AGAIN, unique=False)
    except AbsentFile:
        return {}
