"""Check that a directory's tokenizer loads and fits the model, before any long-running work."""

import logging
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.extras import install_command
from trtforge.core.figures import listed
from trtforge.formats.special_tokens import named_tokens, require_end_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
"""A SentencePiece model, or with Llama 3 the ranks of tiktoken, which is a text."""
_BLOBS = "blobs"  # the directory of files in the hub's cache, to which those of a snapshot are links
_FIRST_PIECE = b"\n"  # field 1 of sentencepiece_model.proto, as protobuf writes it
SLOW_FILES = (SENTENCEPIECE_FILE, "vocab.json", "vocab.txt")
"""Files of a slow tokenizer, which has no tokenizer.json."""


def require_tokenizer(directory: Path, vocab_size: int | None) -> None:
    """Raises ForgeError for a tokenizer.json that cannot be loaded, and for an end id beyond `vocab_size`.

    A directory without a tokenizer is accepted; a slow tokenizer is not loaded. `vocab_size` None: unknown, so end ids
    are not checked.
    """
    names = [name for name in (TOKENIZER_FILE, *SLOW_FILES) if (directory / name).is_file()]
    if TOKENIZER_FILE in names:
        known = load_tokenizer(directory / TOKENIZER_FILE)
        added = {token.content for token in known.get_added_tokens_decoder().values()}
        lacking = [token for token in named_tokens(directory) if token not in added]
        if lacking:
            _LOG.warning(
                f"{directory / TOKENIZER_FILE} lacks {listed(lacking)} among its added_tokens, which other files of "
                "the tokenizer name and transformers adds: here texts with them become other tokens. Save it with "
                "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
            )
    if names and vocab_size is not None:
        require_end_ids(directory, vocab_size)


def require_convertible(directory: Path) -> None:
    """Raises ForgeError if the tokenizer is a SentencePiece model without tokenizer.json, and cannot be converted here.

    `transformers` would report that another package is missing.
    """
    model = directory / SENTENCEPIECE_FILE
    if (directory / TOKENIZER_FILE).is_file() or not model.is_file() or find_spec("sentencepiece") is not None:
        return
    with model.open("rb") as file:
        if file.read(1) != _FIRST_PIECE:
            return
    raise ForgeError(
        f"{directory} has tokenizer.model and no tokenizer.json, which is made of it with sentencepiece",
        hint=f"Run `{install_command('sentencepiece')}`, or add the tokenizer.json of the same model.",
    )


def warn_of_links(files: Iterable[Path]) -> None:
    """Warn of links to files outside their directory and the hub's cache: artifacts contain copies of those."""
    for file in files:
        target = file.resolve()
        if not target.is_relative_to(file.parent.resolve()) and target.parent.name != _BLOBS:
            _LOG.warning(f"{file} is a link to {target}, which is copied into the artifacts")


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer in a tokenizer.json, with truncation and padding switched off, so that it encodes whole texts.

    Raises ForgeError naming the file and the error.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except UnicodeEncodeError:
        raise ForgeError(
            f"{path} cannot be loaded: its name is not UTF-8", hint="Rename the model's directory."
        ) from None
    except BaseException as error:
        # The library raises plain Exception; a panic of its Rust code arrives as PanicException, a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ForgeError(
            f"{path} cannot be loaded: {first_line(error)}",
            hint=f"Download it again, or upgrade tokenizers ({version('tokenizers')}) if a newer release wrote it.",
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
