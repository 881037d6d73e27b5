"""The text and the bytes of single tokens, and the JSON in which their log probabilities are returned."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

TopTokens = Sequence[Sequence[Any]]
"""Pairs of token id and log probability, the most likely first."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LOWEST = -9999.0  # instead of minus infinity, which JSON cannot represent; the value that OpenAI documents
_INCOMPLETE = "\ufffd"


class TokenTexts:
    """Texts of a tokenizer's tokens as they appear within a text: with the space that a word begins with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._shown = self._decode(self._before)
        self._known: dict[int, tuple[str, list[int]]] = {}
        # Byte-level tokenizers write each byte of a token as one character.
        self._byte_of = {character: byte for byte, character in _byte_characters().items()}

    def of(self, token: int) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes of a token. Incomplete characters are U+FFFD in the text, and exact in the bytes."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def scored(self, tokens: Sequence[int], values: Sequence[float | None], top: Sequence[TopTokens]) -> list[object]:
        """An object for each token: token, bytes, id, logprob, top_logprobs. `top` may be empty."""
        alternatives: Sequence[TopTokens] = top or [()] * len(tokens)
        return [
            {
                **self._entry(token, value),
                "top_logprobs": [self._entry(int(each), score) for each, score in others],
            }
            for token, value, others in zip(tokens, values, alternatives, strict=True)
        ]

    def _entry(self, token: int, value: float | None) -> dict[str, object]:
        text, data = self.of(token)
        finite = None if value is None else value if math.isfinite(value) else _LOWEST
        return {"token": text, "bytes": data, "id": token, "logprob": finite}

    def _find(self, token: int) -> tuple[str, list[int]]:
        whole = self._decode([*self._before, token])
        text = whole[len(self._shown) :] if whole.startswith(self._shown) else self._decode([token])
        if _INCOMPLETE not in text:
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
