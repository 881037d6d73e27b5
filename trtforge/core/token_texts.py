"""The text and the bytes of single tokens, as they appear within a text.

The Python API and the text models of a repository use it; models whose servers have no trtforge include this module.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtforge.core.detokenizer import INCOMPLETE, special_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Texts of a tokenizer's tokens as they appear within a text: with the space that a word begins with.

    The bytes of an answer's tokens make its text: a special token, which is left out there, has none.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._shown = self._decode(self._before)
        self._known: dict[tuple[int, bool], tuple[str, list[int]]] = {}
        self.special = special_ids(tokenizer)
        # Byte-level tokenizers write each byte of a token as one character.
        self._byte_of = {character: byte for byte, character in _byte_characters().items()}

    def of(self, token: int, *, begins: bool = False) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes of a token. Incomplete characters are U+FFFD in the text, and exact in the bytes.

        `begins`: as a text begins with it; some tokenizers leave out a space there.
        """
        key = token, begins
        if key not in self._known:
            self._known[key] = self._find(token, begins=begins)
        return self._known[key]

    def begin(self, tokens: Sequence[int]) -> bool:
        """Whether a text that these tokens begin still has to begin."""
        return self.special.issuperset(tokens)

    def _find(self, token: int, *, begins: bool) -> tuple[str, list[int]]:
        whole = self._decode([*self._before, token])
        text = whole[len(self._shown) :] if whole.startswith(self._shown) else self._decode([token])
        if token in self.special:
            return text, []
        if INCOMPLETE not in text:
            text = self._decode([token]) if begins else text
            return text, list(text.encode())
        written = self.tokenizer.id_to_token(token) or ""
        if byte := _BYTE.fullmatch(written):
            return text, [int(byte[1], 16)]
        if written and all(character in self._byte_of for character in written):
            return text, [self._byte_of[character] for character in written]
        return text, list(text.encode())

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def _byte_characters() -> dict[int, str]:
    """The character of each byte in byte-level vocabularies (`bytes_to_unicode` of GPT-2's encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(others)}
