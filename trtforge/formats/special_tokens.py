"""End-of-sequence and padding token ids from a tokenizer directory's files, in order of precedence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from trtforge.core.errors import AbsentFile, ForgeError
from trtforge.core.json_text import read_json_object

GENERATION_CONFIG = "generation_config.json"
_AS_PUBLISHED = "Use the tokenizer and configuration files that came with the model."


@dataclass(frozen=True)
class SpecialTokens:
    """`end_ids`: all end-of-sequence ids, the main one first; may be empty."""

    end_ids: tuple[int, ...]
    pad_id: int


def read_special_tokens(directory: Path) -> SpecialTokens:
    """The tokens by generation_config.json, else config.json, else the tokenizer. Raises ForgeError for a damaged file.

    All ids of a list are kept (Llama 3: end of text, end of message, end of turn).
    """
    sources = [_read(directory / name) for name in (GENERATION_CONFIG, "config.json")]
    special = _special_ids(directory)
    end_ids = next((ids for ids in (_named(source, "eos_token_id") for source in sources) if ids), None)
    pad_ids = next((ids for ids in (_named(source, "pad_token_id") for source in sources) if ids), None)
    ends = end_ids or _ids(special.get("eos_token"))
    pads = pad_ids or _ids(special.get("pad_token")) or ends
    return SpecialTokens(ends, pads[0] if pads else 0)


def generation_config(config: Mapping[str, Any], tokenizer: Path) -> str | None:
    """The text of a generation_config.json for a model whose own has no end id; None if config.json has none either.

    It has the ids of config.json, which `transformers` uses too (`GenerationConfig.from_model_config`), and the
    tokenizer's end of text, with which a chat model ends its turns if it was tuned without changing config.json.
    """
    written = _read(tokenizer / GENERATION_CONFIG)
    ends, pads = (_named(config, key) for key in ("eos_token_id", "pad_token_id"))
    if not ends or _named(written, "eos_token_id"):
        return None
    ends = tuple(dict.fromkeys((*ends, *_ids(_special_ids(tokenizer).get("eos_token")))))
    values = written | {"eos_token_id": list(ends) if len(ends) > 1 else ends[0]}
    if pads and not _named(written, "pad_token_id"):
        values["pad_token_id"] = pads[0]
    return json.dumps(values, indent=2) + "\n"


def require_end_ids(directory: Path, vocab_size: int) -> None:
    """Raises ForgeError naming the file for an end id that is invalid or beyond the vocabulary and thus never
    generated."""
    for name in (GENERATION_CONFIG, "config.json"):
        values = _read(directory / name)
        _require_numbers(directory / name, values.get("eos_token_id"))
        for found in _named(values, "eos_token_id"):
            _require_in_vocabulary(f"{directory / name}: eos_token_id", found, vocab_size)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if "eos_token" in _read(directory / name):
            for found in _ids(_special_ids(directory).get("eos_token")):
                _require_in_vocabulary(f"{directory / name}: the id of eos_token,", found, vocab_size)


def _require_numbers(path: Path, value: object) -> None:
    for each in value if isinstance(value, list) else [value]:
        if each is not None and (isinstance(each, bool) or not isinstance(each, int)):
            raise ForgeError(f"{path}: eos_token_id {each!r:.40} is not a token id", hint=_AS_PUBLISHED)


def _require_in_vocabulary(what: str, found: int, vocab_size: int) -> None:
    if found >= vocab_size:
        raise ForgeError(
            f"{what} {found} is beyond the model's vocabulary of {vocab_size} ids: generation would never stop",
            hint=_AS_PUBLISHED,
        )


def _named(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The ids at a key; for a vision model without its own, those of its language model."""
    text = values.get("text_config")
    return _ids(values.get(key)) or (_ids(text.get(key)) if isinstance(text, dict) else ())


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if _is_id(item)))


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _special_ids(directory: Path) -> Mapping[str, int]:
    """The ids of the tokens named in tokenizer_config.json."""
    names = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
    ids = _added_tokens(directory / "tokenizer.json") | _added_tokens_decoder(directory / "tokenizer_config.json")
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in names.items()}
    return {key: ids[value] for key, value in named.items() if isinstance(value, str) and value in ids}


def named_tokens(directory: Path) -> tuple[str, ...]:
    """The tokens named in files beside tokenizer.json, in order. Raises ForgeError for a damaged file."""
    found = [*_added_tokens_decoder(directory / "tokenizer_config.json"), *_read(directory / "added_tokens.json")]
    names = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
    for key, value in names.items():
        if key.endswith("_token") or key == "additional_special_tokens":
            for each in value if isinstance(value, list) else [value]:
                content = each.get("content") if isinstance(each, dict) else each
                found += [content] if isinstance(content, str) else []
    return tuple(dict.fromkeys(found))


def _added_tokens(path: Path) -> dict[str, int]:
    """Token to id, from a tokenizer.json."""
    try:
        return {entry["content"]: int(entry["id"]) for entry in _read(path).get("added_tokens") or []}
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, "added_tokens") from None


def _added_tokens_decoder(path: Path) -> dict[str, int]:
    """Token to id, from a tokenizer_config.json."""
    try:
        return {entry["content"]: int(key) for key, entry in (_read(path).get("added_tokens_decoder") or {}).items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _damaged(path, "added_tokens_decoder") from None


def _damaged(path: Path, key: str) -> ForgeError:
    return ForgeError(f"{path}: {key} is damaged", hint="Download the file again.")


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, hint="Download the file again.", unique=False)
    except AbsentFile:
        return {}
