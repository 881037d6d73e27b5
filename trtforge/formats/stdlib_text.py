"""English prose of every Python installation: the standard library's docstrings and comments.

The split into a training and a held-out part depends on a module's path alone, so two machines with the
same Python version agree on it without either of them storing the text.
"""

import ast
import hashlib
import inspect
import io
import os
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from random import Random
from typing import Literal

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "turtledemo"}
)
# These modules hold generated tables rather than prose.
_SKIPPED_PREFIXES = ("encodings/cp", "encodings/iso", "encodings/mac_", "config-")
# help()'s texts, the language reference: one dictionary of strings.
_TOPICS = PurePosixPath("pydoc_data/topics.py")
_HELD_OUT_PER_THOUSAND = 45
# Shorter blocks are mostly markers ("# XXX", "# ----") and disabled code.
_MIN_COMMENT_CHARACTERS = 60
_MIN_DOCUMENT_CHARACTERS = 80
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


Part = Literal["train", "held_out"]


def stdlib_documents(part: Part, shuffled_by: Random | None = None) -> Iterator[str]:
    """Yield one document per standard-library module of the given part, ordered by the module's path or shuffled.

    Modules are read lazily: a few documents cost a few files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = _module_paths(root)
    if shuffled_by is not None:
        shuffled_by.shuffle(modules)
    for relative in modules:
        if _is_held_out(relative) == (part == "held_out"):
            document = _module_prose(root / relative, dictionary_values=relative == _TOPICS)
            if len(document) >= _MIN_DOCUMENT_CHARACTERS:
                yield document


def _module_paths(root: Path) -> list[PurePosixPath]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]  # some hold whole environments
        inside = Path(folder).relative_to(root)
        found += [PurePosixPath((inside / name).as_posix()) for name in names if name.endswith(".py")]
    # Compared as text: the order must not depend on how a platform compares path objects.
    return sorted((path for path in found if not str(path).startswith(_SKIPPED_PREFIXES)), key=str)


def _is_held_out(relative: PurePosixPath) -> bool:
    digest = hashlib.sha256(str(relative).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < _HELD_OUT_PER_THOUSAND


def _module_prose(path: Path, *, dictionary_values: bool) -> str:
    """Return a module's docstrings and comment blocks in source order, or "" if it does not parse."""
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        pieces = [*_docstrings(source, dictionary_values=dictionary_values), *_comment_blocks(source)]
    except (SyntaxError, UnicodeDecodeError, ValueError, tokenize.TokenError):
        return ""
    return _normalised("\n\n".join(text for _, text in sorted(pieces)))


def _docstrings(source: str, *, dictionary_values: bool) -> Iterator[tuple[int, str]]:
    with warnings.catch_warnings():
        # Old modules have invalid escape sequences in their strings.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
        elif isinstance(node, ast.Dict) and dictionary_values:
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.lineno, inspect.cleandoc(value.value)


def _comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield runs of whole-line comments that are long enough to be prose."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        line = token.start[0]
        if line != last + 1:
            yield from _as_prose(start, block)
            block, start = [], line
        block.append(re.sub(r"^#+ ?", "", token.string).rstrip())
        last = line
    yield from _as_prose(start, block)


def _as_prose(start: int, block: list[str]) -> Iterator[tuple[int, str]]:
    # Rulers such as "#-----" frame comments without being part of them.
    text = inspect.cleandoc("\n".join(line for line in block if not re.fullmatch(r"[-=*#~_ ]{4,}", line)))
    if len(text) >= _MIN_COMMENT_CHARACTERS:
        yield start, text


def _normalised(text: str) -> str:
    lines = (line.rstrip() for line in text.expandtabs().replace("\f", "").splitlines())
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip()
