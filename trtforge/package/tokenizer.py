"""The tokenizer that goes into a repository: tokenizer.json for serving, the other files for clients, the end ids."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import TOKENIZER_DIRECTORY, tokenizer_files

TOKENIZER_FILE = "tokenizer.json"
_HINT = "Give the Hugging Face checkpoint's directory with --tokenizer DIR."
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class TokenizerAssets:
    """A tokenizer that models can load. `end_ids`: all that end an answer, the main one first; may be empty."""

    directory: Path
    end_ids: tuple[int, ...]
    pad_id: int

    @property
    def files(self) -> tuple[Path, ...]:
        """The files to copy; tokenizer.json is made from the others where the model came without."""
        files = tokenizer_files(self.directory)
        return files if self.is_fast else (self.directory / TOKENIZER_FILE, *files)

    @property
    def is_fast(self) -> bool:
        """Whether the directory has tokenizer.json itself."""
        return (self.directory / TOKENIZER_FILE).is_file()

    def write(self, name: str, target: Path) -> None:
        """Write one of `files` to `target`."""
        if name == TOKENIZER_FILE and not self.is_fast:
            _convert(self.directory, target)
        else:
            shutil.copyfile(self.directory / name, target)


def find_tokenizer(given: Path | None, engine: Path) -> Path:
    """The directory given, or the one that compile put beside the engine. Raises ForgeError if there is none."""
    directory = given or engine / TOKENIZER_DIRECTORY
    names = {path.name for path in tokenizer_files(directory)}
    if TOKENIZER_FILE not in names and not names.intersection(_SLOW_FILES):
        where = f"{directory} has no {TOKENIZER_FILE}" if given else f"{engine} comes without one"
        raise ForgeError(f"tokenizer missing: {where}", hint=_HINT)
    return directory


def read_tokenizer(directory: Path) -> TokenizerAssets:
    """The tokenizer's end and padding ids, from generation_config.json, else config.json, else the tokenizer.

    A list of end ids (Llama 3: end of text, end of message, end of turn) is kept whole.
    """
    sources = [_read(directory / name) for name in ("generation_config.json", "config.json")]
    special = _special_ids(directory)
    end_ids = next((ids for ids in (_ids(source.get("eos_token_id")) for source in sources) if ids), None)
    pad_ids = next((ids for ids in (_ids(source.get("pad_token_id")) for source in sources) if ids), None)
    ends = end_ids or _ids(special.get("eos_token"))
    pads = pad_ids or _ids(special.get("pad_token")) or ends
    return TokenizerAssets(directory, ends, pads[0] if pads else 0)


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in values if isinstance(item, int) and item >= 0))


def _special_ids(directory: Path) -> Mapping[str, int]:
    """The ids of the tokens that tokenizer_config.json names."""
    names = _read(directory / "special_tokens_map.json") | _read(directory / "tokenizer_config.json")
    tokenizer = _read(directory / TOKENIZER_FILE)
    ids = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    ids |= {entry["content"]: int(key) for key, entry in (names.get("added_tokens_decoder") or {}).items()}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in names.items()}
    return {key: ids[value] for key, value in named.items() if isinstance(value, str) and value in ids}


def _convert(directory: Path, target: Path) -> None:
    """Write tokenizer.json of a tokenizer that came in its older form."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            shutil.copyfile(Path(scratch) / TOKENIZER_FILE, target)
    except (OSError, ValueError, ImportError) as error:
        raise ForgeError(
            f"{directory}: the tokenizer cannot be turned into {TOKENIZER_FILE}: {str(error).splitlines()[0]}",
            hint="Load it with AutoTokenizer and save it with save_pretrained, then package that directory.",
        ) from None


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
