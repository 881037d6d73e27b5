"""Token ids to text as they come: returned text never changes, and all pieces together are the whole text.

The Python API and the text models of a repository use it; models whose servers have no trtforge include this module.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from trtforge.core import call_tags, harmony, mistral_tokens
from trtforge.core.reasoning import THOUGHTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAGS = call_tags.TAGS.union(*THOUGHTS)
_KEPT = 8
INCOMPLETE = "\ufffd"
_MOST_HELD, _LAST_HELD = 32, 4
"""Characters that may be held back, and what of more than these still is: the bytes of one character."""


def shows_first_space(guide: str) -> bool:
    """Whether an answer to chat messages shows a space before its first word, which some tokenizers leave out.

    `guide`: the kind of its guide, "" without one. A guide includes the space; structural tags begin with free text.
    """
    return guide not in ("", "structural_tag")


def special_ids(tokenizer: "Tokenizer") -> frozenset[int]:
    """The ids of special tokens, which give no text. Those that divide answers, as in Harmony, do.

    So do tags of calls and of reasoning.
    """
    special = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    kept = set(_TAGS)
    if {harmony.CHANNEL, harmony.MESSAGE} <= set(special.values()):
        kept |= harmony.TOKENS
    if mistral_tokens.CALLS in special.values():
        kept |= mistral_tokens.TOKENS
    for tokens in call_tags.TOKENS:
        if tokens <= set(special.values()):
            kept |= tokens
    return frozenset(id for id, content in special.items() if content not in kept)


_known_special_ids = lru_cache(maxsize=8)(special_ids)


class Detokenizer:
    """The text of one sequence. `context`: ids before it (the prompt), whose text is not returned.

    `special`: the tokenizer's `special_ids`; None: found once for each of the last eight tokenizers, which are kept.

    Incomplete characters are held back; special tokens give no text. Each step decodes only a window of the last ids,
    because decoders look back only a few tokens (spaces between words, the bytes of one character): the cost of a token
    does not grow with the text. `DecodeStream` of tokenizers raises errors where bytes form no character.
    """

    def __init__(
        self, tokenizer: "Tokenizer", context: Sequence[int] = (), special: frozenset[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._special = _known_special_ids(tokenizer) if special is None else special
        self._window = [token for token in context if token not in self._special]
        text = self._decode(self._window)
        self._shown = len(text)
        self._slide(text)

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete.

        It does not depend on how many come at once: a later byte may make those before it invalid.
        """
        return "".join(map(self._pushed, ids))

    def flush(self) -> str:
        """The text held back, at the end of the sequence; bytes that form no character become U+FFFD."""
        text = self._decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new

    def _pushed(self, token: int) -> str:
        if token in self._special:  # however many come, decoding them costs nothing
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(INCOMPLETE)
        stray = len(text) - max(self._shown, len(whole)) > _MOST_HELD  # these bytes form no character
        if stray:
            whole = text[:-_LAST_HELD]
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if stray or len(whole) == len(text):
            self._slide(text)
        return new

    def _slide(self, text: str) -> None:
        """Drop the older half of the window, cut where the rest alone decodes to the end of the same text."""
        if len(self._window) <= 2 * _KEPT:
            return
        held = len(text) - self._shown
        for kept in range(_KEPT, 2 * _KEPT):
            tail = self._window[-kept:]
            decoded = self._decode(tail)
            if len(decoded) > held and text.endswith(decoded):
                self._shown = len(decoded) - held
                self._window = tail
                return

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
