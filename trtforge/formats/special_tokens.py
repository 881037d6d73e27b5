"""Which token ids end an answer or pad one: what a tokenizer directory's files say, in the order of their weight."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError


@dataclass(frozen=True)
class SpecialTokens:
    """`end_ids`: all that end an answer, the main one first; may be empty."""

    end_ids: tuple[int, ...]
    pad_id: int


def read_special_tokens(directory: Path) -> SpecialTokens:
    """From generation_config.json, else config.json, else the tokenizer. Raises ForgeError for a damaged file.

    A list of end ids (Llama 3: end of text, end of message, end of turn) is kept whole.
    """
    sources = [_read(directory / name) for name in ("generation_config.json", "config.json")]
    special = _special_ids(directory)
    end_ids = next((ids for ids in (_ids(source.get("eos_token_id")) for source in sources) if ids), None)
    pad_ids = next((ids for ids in (_ids(source.get("pad_token_id")) for source in sources) if ids), None)
    ends = end_ids or _ids(special.get("eos_token"))
    pads = pad_ids or _ids(special.get("pad_token")) or ends
    return SpecialTokens(ends, pads[0] if pads else 0)


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if isinstance(item, int) and item >= 0))


def _special_ids(directory: Path) -> Mapping[str, int]:
    """The ids of the tokens that tokenizer_config.json names."""
    names = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
    tokenizer = _read(directory / "tokenizer.json")
    ids = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    ids |= {entry["content"]: int(key) for key, entry in (names.get("added_tokens_decoder") or {}).items()}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in names.items()}
    return {key: ids[value] for key, value in named.items() if isinstance(value, str) and value in ids}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ForgeError(f"{path}: not readable: {error}", hint="Download the file again.") from None
    if not isinstance(values, dict):
        raise ForgeError(f"{path}: not a JSON object", hint="Download the file again.")
    return values
