"""The JSON in which the log probabilities of tokens are returned, with their texts and bytes."""

import json
import math
from collections.abc import Sequence
from typing import Any

from trtforge.core.token_texts import TokenTexts

TopTokens = Sequence[Sequence[Any]]
"""Pairs of token id and log probability, the most likely first."""
_LOWEST = -9999.0  # instead of minus infinity, which JSON cannot represent; the value that OpenAI documents


class ScoredTexts(TokenTexts):
    """Texts of tokens with their log probabilities."""

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
            begins = begins and token in self.special
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
            if token in self.special:
                entry["bytes"] = list(self.of(token)[0].encode())
        return found

    def _entry(self, token: int, value: float | None, *, begins: bool) -> dict[str, object]:
        text, data = self.of(token, begins=begins)
        finite = None if value is None else value if math.isfinite(value) else _LOWEST
        return {"token": text, "bytes": data, "id": token, "logprob": finite}


def as_json(entries: Sequence[object]) -> bytes:
    """The entries as a JSON array."""
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
