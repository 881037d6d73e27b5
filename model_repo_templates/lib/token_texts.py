"""The text and the bytes of single tokens, and the JSON in which their log probabilities are returned."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from trtforge.core.detokenizer import special_ids

TopTokens = Sequence[Sequence[Any]]
"""Pairs of token id and log probability, the most likely first."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LOWEST = -9999.0  # instead of minus infinity, which JSON cannot represent; the value that OpenAI documents
_INCOMPLETE = "\ufffd"


class TokenTexts:
    """Texts of a tokenizer's tokens as they appear within a text: with the space that a word begins with.

    The bytes of an answer's tokens make its text: a special token, which is left out there, has none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._shown = self._decode(self._before)
        self._known: dict[tuple[int, bool], tuple[str, list[int]]] = {}
        self._special = special_ids(tokenizer)
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
        return self._special.issuperset(tokens)

    def scored(
        self, tokens: Sequence[int], values: Sequence[float | None], top: Sequence[TopTokens], *, begins: bool
    ) -> list[dict[str, object]]:
        """An object for each token: token, bytes, id, logprob, top_logprobs. `top` may be empty.

        `begins`: no text comes before them.
        """
        alternatives: Sequence[TopTokens] = top or [()] * len(tokens)
        found: list[dict[str, object]] = []
        for token, value, others in zip(tokens, values, alternatives, strict=True):
            likely = [self._entry(int(each), score, begins=begins) for each, score in others]
            found.append({**self._entry(token, value, begins=begins), "top_logprobs": likely})
            begins = begins and token in self._special
        return found

    def prompt(
        self, tokens: Sequence[int], values: Sequence[float | None], top: Sequence[TopTokens]
    ) -> list[dict[str, object]]:
        """As `scored` of a prompt, which is shown with its special tokens."""
        found = [
            *self.scored(tokens[:1], values[:1], top[:1], begins=True),
            *self.scored(tokens[1:], values[1:], top[1:], begins=False),
        ]
        for token, entry in zip(tokens, found, strict=True):
            if token in self._special:
                entry["bytes"] = list(self.of(token)[0].encode())
        return found

    def _entry(self, token: int, value: float | None, *, begins: bool) -> dict[str, object]:
        text, data = self.of(token, begins=begins)
        finite = None if value is None else value if math.isfinite(value) else _LOWEST
        return {"token": text, "bytes": data, "id": token, "logprob": finite}

    def _find(self, token: int, *, begins: bool) -> tuple[str, list[int]]:
        whole = self._decode([*self._before, token])
        text = whole[len(self._shown) :] if whole.startswith(self._shown) else self._decode([token])
        if token in self._special:
            return text, []
        if _INCOMPLETE not in text:
            text = self._decode([token]) if begins else text
            return text, list(text.encode())
        written = self._tokenizer.id_to_token(token) or ""
        if byte := _BYTE.fullmatch(written):
            return text, [int(byte[1], 16)]
        if written and all(character in self._byte_of for character in written):
            return text, [self._byte_of[character] for character in written]
        return text, list(text.encode())

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def as_json(entries: Sequence[object]) -> bytes:
    """The entries as a JSON array."""
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()


def _byte_characters() -> dict[int, str]:
    """The character of each byte in byte-level vocabularies (`bytes_to_unicode` of GPT-2's encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(others)}
