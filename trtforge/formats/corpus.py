"""Calibration and verification samples: reads text from the user's source and cuts it into windows of token ids.

Documents are joined by the tokenizer's begin-of-text token (if it adds one) and cut into windows of one length, so that
no padding enters a statistic.
"""

import logging
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from trtforge.core.defaults import CALIBRATION_DATA
from trtforge.core.digest import file_digest, text_digest
from trtforge.core.errors import ForgeError, first_line
from trtforge.core.extras import install_command
from trtforge.core.json_text import parse_json
from trtforge.core.memory_errors import out_of_memory
from trtforge.formats.hub_data import PREFIX, commit_of, hub_rows, require_hub_data
from trtforge.formats.stdlib_text import Part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
BUILTIN = CALIBRATION_DATA
_SUFFIXES = (".jsonl", ".txt", ".parquet", ".safetensors")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_KINDS = f"FILE.jsonl, FILE.txt, FILE.parquet, FILE.safetensors, hf:ID[@REVISION][:CONFIG[:SPLIT]] or {BUILTIN}"


@dataclass(frozen=True)
class TokenWindows:
    """Token ids, one tuple per window. All windows have the same length, unless the data does not fill the first.

    `document_lengths`: tokens of each document that was read; for stored ids, of each row.
    """

    windows: tuple[tuple[int, ...], ...]
    document_lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in all windows."""
        return sum(len(window) for window in self.windows)

    @property
    def length_histogram(self) -> dict[str, int]:
        """Number of documents by token count, rounded up to a power of two; ascending."""
        bounds = Counter(1 << max(0, length - 1).bit_length() for length in self.document_lengths)
        return {str(bound): count for bound, count in sorted(bounds.items())}

    @cached_property
    def digest(self) -> str:
        """Hex BLAKE3 of the ids (32-bit little-endian) and the windows' bounds."""
        hasher = blake3()
        for window in self.windows:
            hasher.update(len(window).to_bytes(4, "little"))
            hasher.update(b"".join(token.to_bytes(4, "little") for token in window))
        return hasher.hexdigest()


@dataclass(frozen=True)
class _Document:
    """One text, or the messages of one conversation, and its location (file and line)."""

    where: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()


def token_windows(
    source: str, model: Path, *, samples: int, length: int, vocab_size: int, seed: int, part: Part = "train"
) -> TokenWindows:
    """At most `samples` windows of `length` tokens from `source`, its documents shuffled by `seed`.

    `part`: of the built-in text, so that quality is never measured on calibration samples. Stored ids are used in
    order.

    `model` is the checkpoint directory whose tokenizer and chat template are used; ids need neither. Raises ForgeError
    naming file and line for data that is absent, unreadable, without the field, empty, or outside the vocabulary.
    """
    path = Path(source)
    if not needs_tokenizer(source):
        windows = _stored_ids(path, samples, length)
        lengths = [len(window) for window in windows]
    else:
        windows, lengths = _cut(_documents(source, Random(seed), part), _tokenizer(model), samples, length)
    if not windows or min(map(len, windows)) < 2:
        raise ForgeError(f"{source}: fewer than two tokens of text", hint="Give data with text in it.")
    largest, smallest = max(map(max, windows)), min(map(min, windows))
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        raise ForgeError(
            f"{source}: token id {wrong} is outside the model's vocabulary of {vocab_size}",
            hint="The data or the tokenizer belongs to another model.",
        )
    found = TokenWindows(windows, tuple(lengths))
    if found.tokens < samples * length:
        wanted = f"{samples * length:,} tokens asked for ({samples} samples of {length})"
        _LOG.warning("%s has only %s of the %s", source, f"{found.tokens:,}", wanted)
    return found


def content_of(source: str) -> str | None:
    """Hex BLAKE3 that identifies the text that `source` names now; None if unknown because the hub is not reachable."""
    if Path(source).is_file():
        return file_digest(Path(source))
    if source.startswith(PREFIX):
        with suppress(ForgeError):
            return text_digest(commit_of(source))
        return None
    return text_digest(f"{source} of Python {platform.python_version()}")


def needs_tokenizer(source: str) -> bool:
    """Whether the data is text; safetensors contain token ids."""
    return Path(source).suffix != ".safetensors"


def require_data(source: str, model: Path | None = None) -> None:
    """Raises ForgeError if the data does not exist or its kind is not supported, without reading it.

    `model`: the checkpoint directory, which must have a tokenizer for text.
    """
    if source.startswith(PREFIX):
        require_hub_data(source)
    elif source != BUILTIN:
        _require_file(Path(source), source)
    if model is not None and needs_tokenizer(source):
        _require_tokenizer_files(model)


def _require_tokenizer_files(model: Path) -> None:
    from trtforge.formats.hf import tokenizer_files
    from trtforge.formats.tokenizer import require_convertible

    if not any(path.name.startswith("tokenizer.") for path in tokenizer_files(model)):
        raise ForgeError(
            f"{model} has no tokenizer (tokenizer.json or tokenizer.model)",
            hint="Download the tokenizer files, or give token ids as FILE.safetensors.",
        )
    require_convertible(model)


def _documents(source: str, order: Random, part: Part) -> Iterator[_Document]:
    """The documents of a source, shuffled by `order`; the built-in text is read lazily."""
    if source == BUILTIN:
        from trtforge.formats.stdlib_text import stdlib_documents

        yield from (_Document(source, text=text) for text in stdlib_documents(part, order))
        return
    if source.startswith(PREFIX):
        yield from (_row(row, where) for where, row in hub_rows(source, order.randrange(1 << 31)))
        return
    documents = list(_read(Path(source), source))
    order.shuffle(documents)
    yield from documents


def _require_file(path: Path, source: str) -> None:
    if path.is_dir():
        raise ForgeError(f"{source}: a directory, not a file with text", hint=f"Give {_KINDS}.")
    if not path.is_file():
        of_hub = path.suffix not in _SUFFIXES and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None
        hub = f"A dataset of the hub is {PREFIX}{source}. " if of_hub else ""
        raise ForgeError(f"{source}: no such file", hint=f"{hub}Give {_KINDS}.")
    if path.suffix not in _SUFFIXES:
        unpack = "Unpack it. " if path.suffix in _PACKED else ""
        raise ForgeError(f"{source}: not a supported kind of data", hint=f"{unpack}Give {_KINDS}.")


def _read(path: Path, source: str) -> Iterator[_Document]:
    _require_file(path, source)
    match path.suffix:
        case ".jsonl":
            yield from _json_lines(path)
        case ".parquet":
            yield from _parquet_rows(path)
        case _:
            # A form feed separates documents, as in the demo model's held-out text.
            texts = _read_text(path).split("\f")
            yield from (_Document(str(path), text=text.strip()) for text in texts if text.strip())


def _json_lines(path: Path) -> Iterator[_Document]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        yield _row(parse_json(line, where, hint="One JSON object a line.", unique=False, halves=True), where)


def _parquet_rows(path: Path) -> Iterator[_Document]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ForgeError("reading parquet needs pyarrow", hint=f"Run `{install_command('calibrate')}`.") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowInvalid, OSError) as error:
        raise ForgeError(f"{path}: not parquet: {error}", hint="Write the file again.") from None
    for number, row in enumerate(rows, start=1):
        yield _row(row, f"{path}: row {number}")


def _row(row: object, where: str) -> _Document:
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return _Document(where, text=row["text"])
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return _Document(where, messages=tuple(messages))
    keys = ""
    if isinstance(row, dict):
        held = next((f"its {key}: {row[key]!r:.40}" for key in ("text", "messages") if key in row), None)
        keys = f" ({held or 'its keys: ' + (', '.join(map(str, row)) or 'none')})"
    raise ForgeError(
        f'{where}: neither a "text" string nor a "messages" list of messages with a role{keys}',
        hint='Rows look like {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}.',
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _cut(
    documents: Iterable[_Document], tokenizer: "PreTrainedTokenizerBase", samples: int, length: int
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Windows of `length` ids (one shorter window if the data does not fill it), and each document's number of ids."""
    windows: list[tuple[int, ...]] = []
    lengths: list[int] = []
    pending: list[int] = []
    for document in documents:
        try:
            ids = _encode(document, tokenizer)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            raise ForgeError(
                f"{document.where}: the tokenizer fails: {type(error).__name__}: {first_line(error)}",
                hint="Fetch tokenizer.json and tokenizer_config.json again.",
            ) from None
        lengths.append(len(ids))
        pending += ids
        while len(pending) >= length and len(windows) < samples:
            windows.append(tuple(pending[:length]))
            del pending[:length]
        if len(windows) == samples:
            break
    if not windows and pending:
        windows.append(tuple(pending))
    return tuple(windows), lengths


def _encode(document: _Document, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    if document.text is not None:
        return list(tokenizer(_encodable(document.text), verbose=False)["input_ids"])
    if tokenizer.chat_template is None:
        raise ForgeError(
            f'{document.where}: "messages" need a chat template, and the tokenizer has none',
            hint='Give "text", or use the instruction-tuned checkpoint.',
        )
    from jinja2 import TemplateSyntaxError

    try:
        text = tokenizer.apply_chat_template(list(document.messages), tokenize=False)
    except TemplateSyntaxError as error:
        raise ForgeError(
            f"the tokenizer's chat template is damaged: {error}", hint='Fix it in the checkpoint, or give "text".'
        ) from None
    except Exception as error:  # the template's expressions raise any
        raise ForgeError(
            f"{document.where}: the chat template rejects the messages: {error}",
            hint='Messages look like {"role": "user", "content": "..."} and alternate as the model expects.',
        ) from None
    return list(tokenizer(_encodable(str(text)), add_special_tokens=False, verbose=False)["input_ids"])


def _encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which occur in scraped JSON and which UTF-8 cannot encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _stored_ids(path: Path, samples: int, length: int) -> tuple[tuple[int, ...], ...]:
    from trtforge.formats.shards import RowReader, read_header

    tensors = {tensor.spec.name: tensor for tensor in read_header(path)}
    ids = tensors.get("input_ids")
    if ids is None or ids.spec.dtype.name != "int64" or len(ids.spec.shape) != 2:
        raise ForgeError(
            f"{path}: no input_ids of dtype int64 and shape [samples, seq]",
            hint="Save the token ids as {'input_ids': int64 tensor [samples, seq]}.",
        )
    rows, columns = ids.spec.shape
    rows = min(rows, samples)
    with RowReader() as reader:
        data = reader.read(ids, 0, rows, memoryview(bytearray(rows * ids.spec.row_bytes)))
    values = data.cast("q").tolist()
    return tuple(tuple(values[row * columns : row * columns + min(columns, length)]) for row in range(rows))


def _tokenizer(model: Path) -> "PreTrainedTokenizerBase":
    _require_tokenizer_files(model)
    from transformers import AutoTokenizer

    from trtforge.formats.flag_numbers import config_with_flags
    from trtforge.formats.tokenizer import TOKENIZER_FILE, load_tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, config=config_with_flags(model), trust_remote_code=False)
    except Exception as error:  # damaged files raise exceptions of any type
        if out_of_memory(error) is not None:
            raise
        if (model / TOKENIZER_FILE).is_file():
            load_tokenizer(model / TOKENIZER_FILE)  # raises a clearer error if this file is the cause
        raise ForgeError(
            f"{model}: its tokenizer cannot be loaded: {type(error).__name__}: {first_line(error)}",
            hint="Fetch the tokenizer again.",
        ) from None
    result: PreTrainedTokenizerBase = tokenizer
    return result


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}", hint=f"Give {_KINDS}.") from None
    except UnicodeDecodeError as error:
        raise ForgeError(f"{path}: not UTF-8 text (byte {error.start})", hint="Save the file as UTF-8.") from None
