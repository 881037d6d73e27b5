"""The tokenizer of a repository: tokenizer.json for serving, the other files for clients, the end ids."""

import json
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.figures import counted
from trtforge.formats.chat_template import ChatTemplate, read_chat_template
from trtforge.formats.hf import TOKENIZER_DIRECTORY, tokenizer_files
from trtforge.formats.special_tokens import read_special_tokens
from trtforge.formats.tokenizer import (
    SLOW_FILES,
    TOKENIZER_FILE,
    load_tokenizer,
    require_convertible,
    require_tokenizer,
)
from trtforge.package.template_check import try_template

CHAT_FILE = "chat.json"
_LOG = logging.getLogger(__name__)
_HINT = "Give the Hugging Face checkpoint's directory with --tokenizer DIR."


@dataclass(frozen=True)
class TokenizerAssets:
    """A tokenizer that models can load. `end_ids`: all ids that end an answer, the main one first; may be empty.

    `chat`: its chat template, None without one.
    """

    directory: Path
    end_ids: tuple[int, ...]
    pad_id: int
    chat: ChatTemplate | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files to copy; a missing tokenizer.json is converted from the others, chat.json has templates."""
        files = tuple(path for path in tokenizer_files(self.directory) if path.parent == self.directory)
        return files if self.is_fast else (self.directory / TOKENIZER_FILE, *files)

    @property
    def is_fast(self) -> bool:
        """Whether the directory has tokenizer.json itself."""
        return (self.directory / TOKENIZER_FILE).is_file()

    def write_chat(self, target: Path) -> None:
        """Write the chat template in the form that models read, if there is one."""
        if self.chat is not None:
            target.write_text(json.dumps(self.chat.as_json(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    def write_guidance(self, target: Path) -> None:
        """Write the tokenizer in the form that the executor reads for guided decoding.

        Source: `getGuidedDecodingConfigFromParams` in model_instance_state.cc; TensorRT-LLM's
        examples/generate_xgrammar_tokenizer_info.py writes the same.
        """
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / TOKENIZER_FILE
            self.write(TOKENIZER_FILE, path)
            tokenizer = load_tokenizer(path)
        by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        info = {
            "encoded_vocab": [token for token, _ in by_id],
            "tokenizer_str": tokenizer.to_str(),
            "stop_token_ids": list(self.end_ids),
        }
        target.write_text(json.dumps(info, ensure_ascii=False) + "\n", encoding="utf-8")

    def write(self, name: str, target: Path) -> None:
        """Write one of `files` to `target`."""
        if name == TOKENIZER_FILE and not self.is_fast:
            _convert(self.directory, target)
        else:
            shutil.copyfile(self.directory / name, target)


def find_tokenizer(given: Path | None, engine: Path) -> Path:
    """The directory given, or the one that compile put into the engine. Raises ForgeError if there is no tokenizer."""
    directory = given or _own_directory(engine)
    names = {path.name for path in tokenizer_files(directory)}
    if TOKENIZER_FILE not in names and not names.intersection(SLOW_FILES):
        where = f"{directory} has no {TOKENIZER_FILE}" if given else f"{engine} contains none"
        where = where if directory.is_dir() else f"{directory} is not a directory"
        raise ForgeError(f"tokenizer missing: {where}", hint=_HINT)
    return directory


def _own_directory(engine: Path) -> Path:
    """Where compile puts an engine's tokenizer; for the llmapi backend beside its other files."""
    beside = engine / TOKENIZER_DIRECTORY
    return beside if beside.is_dir() else engine


def read_tokenizer(directory: Path, vocab_size: int) -> TokenizerAssets:
    """The tokenizer with its end and padding ids. Raises ForgeError as the checks in formats.tokenizer do."""
    require_tokenizer(directory, vocab_size)
    require_convertible(directory)
    special = read_special_tokens(directory)
    return TokenizerAssets(directory, special.end_ids, special.pad_id, _usable_template(directory))


def other_tokenizer(given: Path, engine: Path, vocab_size: int, *, guides: bool) -> tuple[str, ...]:
    """A warning for a tokenizer whose token ids differ from the engine's own; empty if either is not fast.

    `guides`: whether the engine supports guided decoding, which uses its own tokenizer. Raises ForgeError for ids of
    words beyond `vocab_size`, which the engine refuses.
    """
    file, own_file = given / TOKENIZER_FILE, _own_directory(engine) / TOKENIZER_FILE
    if not file.is_file():
        return ()
    tokenizer = load_tokenizer(file)
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if largest >= vocab_size:
        raise ForgeError(
            f"{file} has ids up to {largest}, and the engine's vocabulary {vocab_size} ids: it is another model's",
            hint="Leave out --tokenizer, or give the directory of the model that the engine was made from.",
        )
    if not own_file.is_file() or file.samefile(own_file):
        return ()
    other = tokenizer.get_vocab().items() ^ load_tokenizer(own_file).get_vocab().items()
    if not other:
        return ()
    count, example = len({token for token, _ in other}), min(other, key=lambda pair: pair[::-1])[0]
    whose = "the model and its guides" if guides else "the model"
    return (
        f"{file} and the engine's own tokenizer differ in {counted(count, 'token')}, such as {example!r}: prompts and "
        f"texts follow the first, {whose} the second. Leave out --tokenizer, unless the model was trained with these",
    )


def _usable_template(directory: Path) -> ChatTemplate | None:
    """The chat template; None, with a warning, for one that served models could not use."""
    chat = read_chat_template(directory)
    if chat is None:
        return None
    tried = try_template(chat)
    if tried.problem is not None:
        said = f"{directory}: the chat template cannot be used, {tried.problem}"
        _LOG.warning(f"{said}: the repository is packaged without chat")
        return None
    if tried.lacks is not None:
        _LOG.warning(f"{directory}: the chat template {tried.lacks}")
    return chat


def _convert(directory: Path, target: Path) -> None:
    """Convert a slow tokenizer to tokenizer.json."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            shutil.copyfile(Path(scratch) / TOKENIZER_FILE, target)
    except (OSError, ValueError, ImportError) as error:
        raise ForgeError(
            f"{directory}: the tokenizer cannot be converted to {TOKENIZER_FILE}: {str(error).splitlines()[0]}",
            hint="Load it with AutoTokenizer and save it with save_pretrained, then package that directory.",
        ) from None
