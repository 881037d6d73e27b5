"""Compiles guides to grammars over one tokenizer's vocabulary, and keeps the most recently used ones."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.core.errors import ForgeError, RequestError, first_line
from trtforge.core.extras import install_command
from trtforge.core.json_text import parse_json
from trtforge.engine_process.requests import LONGEST_GUIDE, Guide, GuideKind
from trtforge.formats.tokenizer import TOKENIZER_FILE, load_tokenizer
from trtforge.runtime.guidance.compiler_process import CompilerProcess
from trtforge.runtime.guidance.ebnf import check_grammar
from trtforge.runtime.guidance.long_repetitions import expression_grammar, has_long_repetitions
from trtforge.runtime.guidance.patterns import class_states, optional_parts
from trtforge.runtime.guidance.schemas import enforceable
from trtforge.runtime.guidance.tags import enforceable_tag
from trtforge.runtime.guidance.unenforced import Unenforced

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trtforge.runtime.guidance.vocabulary_compiler import VocabularyCompiler

_MOST_KEPT = 256
_MOST_KEPT_BYTES = 80 << 20
_AS_JSON = ("json_schema", "structural_tag")
_FEW_LEFT_OUT = 30
_FEW_CHARACTERS = 2000
_FEW_TOKENS_OF_STATES = 10_000_000
"""States with classes of characters, times tokens of the vocabulary: about a second of compilation."""
_SOURCE = re.compile(
    r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?"
    r"(Failed to build the automaton for rule \S+ with regex .*?: (?=Regex parsing error|Invalid ))?"
    r"(Regex parsing error at position \d+: )?",
    re.DOTALL,
)
"""Prefixes of xgrammar's error messages: positions in its own code and in a rewritten expression."""
_HINTS = {
    "json": "Report this as a bug.",
    "json_schema": "Correct the JSON schema; xgrammar takes most of draft 2020-12.",
    "regex": "Correct the regular expression; back references and word boundaries are not supported.",
    "ebnf_grammar": "Correct the grammar: rules `name ::= ...`, the first one named root.",
    "structural_tag": "Correct the structural tag, an object with type structural_tag and a format.",
}


def require_xgrammar() -> None:
    """Raises RequestError if the package is missing."""
    if find_spec("xgrammar") is None:
        raise RequestError(
            "guided decoding needs the package xgrammar, which is not installed here",
            hint=f"Run `{install_command('guided')}`.",
        )


class Grammars:
    """Compiles guides; `found` and `compiled` may be called from different threads."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """`directory`: contains tokenizer.json."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._texts: list[str] = []
        self._apart: CompilerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._kept: OrderedDict[Guide, tuple[Any, int]] = OrderedDict()  # with their bytes
        self._kept_bytes = 0

    def found(self, guide: Guide) -> Any:
        """The kept grammar (xgrammar.CompiledGrammar) of a guide; None if there is none."""
        with self._lock:
            if guide not in self._kept:
                return None
            self._kept.move_to_end(guide)
            return self._kept[guide][0]

    def compiled(self, guide: Guide) -> Any:
        """The grammar of a guide, compiled if new. Raises RequestError if it is wrong, ForgeError without tokenizer."""
        grammar = self.found(guide)
        if grammar is not None:
            return grammar
        try:
            grammar, size = self._compile(guide)
        except Unenforced as error:
            raise _refused(guide, str(error)) from None
        except UnicodeError:  # a message quotes part of a character, or a guide is not valid Unicode
            raise _refused(guide, "it cannot be parsed") from None
        except RuntimeError as error:  # xgrammar's own errors derive from it
            raise _refused(guide, _SOURCE.sub("", first_line(error))[:300].rstrip(" .")) from None
        self._keep(guide, grammar, size)
        return grammar

    def with_text(self, tokens: list[int]) -> list[int]:
        """The tokens that a grammar may allow as part of its text. A grammar must have been compiled before."""
        return [token for token in tokens if self._texts[token]]

    def close(self) -> None:
        """End the compiler process. No guide that needs it is compiled afterwards."""
        with self._lock:
            self._closed = True
            apart = self._apart
        if apart is not None:
            apart.close()

    def _compile(self, guide: Guide) -> tuple[Any, int]:
        """The grammar of a guide, and about how many bytes it takes.

        xgrammar counts its bytes, but not those of rules, of which grammars from the other process may have many; their
        JSON is one to two times as long as they are large.
        """
        value = value_of(guide)
        text, compiler = _enforced(guide.kind, value), self._compiler
        if may_take_long(guide.kind, value, self._vocab_size):
            compiled = self._process(compiler.whole).compile(guide.kind, text)
            return compiler.read(guide.kind, compiled), len(compiled)
        grammar = compiler.compile(guide.kind, text)
        return grammar, grammar.memory_size_bytes

    def _process(self, vocabulary: Any) -> CompilerProcess:
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if self._apart is None:
                self._apart = CompilerProcess(vocabulary.serialize_json())
            return self._apart

    @cached_property
    def _compiler(self) -> "VocabularyCompiler":
        from trtforge.runtime.guidance.vocabulary_compiler import VocabularyCompiler

        return VocabularyCompiler(self._vocabulary())

    def _vocabulary(self) -> Any:
        """The vocabulary as xgrammar.TokenizerInfo. Special tokens have no text, so no grammar allows them.

        It names no end ids: each request has its own, and an end id named here would be allowed within any text.
        """
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        if not (self._directory / TOKENIZER_FILE).is_file():
            raise RequestError(
                "guided decoding needs the tokenizer, and this engine has none",
                hint="Convert from a checkpoint directory that has tokenizer.json, then compile again.",
            )
        tokenizer = load_tokenizer(self._directory / TOKENIZER_FILE)
        whole = xgrammar.TokenizerInfo.from_huggingface(
            PreTrainedTokenizerFast(tokenizer_object=tokenizer), vocab_size=self._vocab_size, stop_token_ids=[0]
        )
        self._texts = token_texts(tokenizer, self._vocab_size)
        return xgrammar.TokenizerInfo(
            self._texts,
            whole.vocab_type,
            vocab_size=self._vocab_size,
            stop_token_ids=[],
            add_prefix_space=whole.add_prefix_space,
        )

    def _keep(self, guide: Guide, grammar: Any, size: int) -> None:
        """Keep a grammar; drop the least recently used ones beyond the limits."""
        with self._lock:
            self._kept[guide] = grammar, size
            self._kept_bytes += size
            while len(self._kept) > _MOST_KEPT or (self._kept_bytes > _MOST_KEPT_BYTES and len(self._kept) > 1):
                _, (_, dropped) = self._kept.popitem(last=False)
                self._kept_bytes -= dropped


def may_take_long(kind: GuideKind, value: Any, vocab_size: int) -> bool:
    """Whether compiling this guide may take longer than a second.

    Successive optional parts take time quadratic in their number. Schemas and expressions have a bounded number of
    them, grammar rules any number. Long repetitions of characters take seconds, too, and so do expressions with many
    classes of characters, each of which is compared with all tokens.
    """
    if kind == "ebnf_grammar" or (kind == "structural_tag" and '"type": "grammar"' in json.dumps(value)):
        return True
    expressions = [value] if kind == "regex" else list(_expressions(value))
    return (
        sum(map(class_states, expressions)) * vocab_size > _FEW_TOKENS_OF_STATES
        or sum(map(len, expressions)) > _FEW_CHARACTERS
        or sum(map(optional_parts, expressions)) > _FEW_LEFT_OUT
        or (kind == "regex" and has_long_repetitions(value))
    )


def _expressions(value: Any) -> Iterator[str]:
    """The expressions in a schema or structural tag."""
    if isinstance(value, dict):
        if isinstance(value.get("pattern"), str):
            yield value["pattern"]
        named = value.get("patternProperties")
        if isinstance(named, dict):
            yield from named
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _expressions(each)


def token_texts(tokenizer: "Tokenizer", vocab_size: int) -> list[str]:
    """The tokenizer's text of each token id; empty for special and unused tokens."""
    texts = [""] * vocab_size
    for text, token in tokenizer.get_vocab().items():
        if token < vocab_size:
            texts[token] = text
    for token, added in tokenizer.get_added_tokens_decoder().items():
        if added.special and token < vocab_size:
            texts[token] = ""
    return texts


def _refused(guide: Guide, said: str) -> RequestError:
    return RequestError(f"the guide of type {guide.kind} is refused: {said}", hint=_HINTS[guide.kind])


def value_of(guide: Guide) -> Any:
    """The JSON of a schema or structural tag, the text of another guide. Raises RequestError."""
    if len(guide.text) > LONGEST_GUIDE:
        message = f"the guide has {len(guide.text)} characters, at most {LONGEST_GUIDE} are accepted"
        raise RequestError(message, hint="Ask for a smaller structure.")
    if guide.kind not in _AS_JSON:
        return guide.text
    try:
        return parse_json(guide.text, f"the guide of type {guide.kind}", hint=_HINTS[guide.kind])
    except ForgeError as error:
        raise RequestError(error.message, hint=error.hint) from None


def _enforced(kind: GuideKind, value: Any) -> str:
    """The guide as text of which xgrammar enforces everything. Raises Unenforced."""
    match kind:
        case "json_schema":
            return json.dumps(enforceable(value, controls=False), ensure_ascii=False)
        case "structural_tag":
            return json.dumps(enforceable_tag(value), ensure_ascii=False)
        case "regex":
            return expression_grammar(value)
        case "ebnf_grammar":
            check_grammar(value)
    return str(value)
