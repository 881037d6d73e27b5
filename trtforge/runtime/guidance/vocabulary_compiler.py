"""xgrammar's compiler for one tokenizer's vocabulary, used in the engine and in the process of `compiler_main`."""

from functools import cached_property
from typing import Any

import xgrammar

_SPACE = 0x20
_JSON = ("json", "json_schema")


class VocabularyCompiler:
    """Compiles guides for one vocabulary (xgrammar.TokenizerInfo); does not cache grammars."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def compile(self, kind: str, text: str) -> Any:
        """The grammar (xgrammar.CompiledGrammar) of a text. Raises RuntimeError, the base of xgrammar's errors."""
        compiler = xgrammar.GrammarCompiler(self._vocabulary(kind), max_threads=1, cache_enabled=False)
        match kind:
            case "json":
                return compiler.compile_builtin_json_grammar()
            case "json_schema":
                # Fixed white space: otherwise a model could generate it forever.
                return compiler.compile_json_schema(text, any_whitespace=False)
            case "structural_tag":
                return compiler.compile_structural_tag(text)
        return compiler.compile_grammar(text)

    def read(self, kind: str, grammar: str) -> Any:
        """The grammar from the JSON of a process that compiled it for the same vocabulary."""
        return xgrammar.CompiledGrammar.deserialize_json(grammar, self._vocabulary(kind))

    def _vocabulary(self, kind: str) -> Any:
        return self._for_json if kind in _JSON else self.whole

    @cached_property
    def _for_json(self) -> Any:
        """The vocabulary without control characters, which strings of bounded length would allow."""
        return xgrammar.TokenizerInfo(
            [b"" if min(text, default=0) < _SPACE else text for text in self.whole.decoded_vocab],
            xgrammar.VocabType.RAW,
            vocab_size=self.whole.vocab_size,
            stop_token_ids=[],
            add_prefix_space=self.whole.add_prefix_space,
        )
