"""Token ids to text as they come: returned text never changes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_KEPT = 8
_INCOMPLETE = "\ufffd"
_MOST_HELD, _LAST_HELD = 32, 4
"""Characters that may be held back, and what of more than these still is: the bytes of one character."""


class TextDecoder:
    """The text of the tokens after a prompt; incomplete characters are held back, special tokens give no text.

    As `Detokenizer` of the Triton models, which also run where trtforge is not installed: each step decodes only the
    last tokens, because decoders look back only a few. `DecodeStream` of tokenizers raises errors where bytes form no
    character.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._window = list(prompt)
        text = tokenizer.decode(self._window)
        self._shown = len(text)
        self._slide(text)

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete.

        It does not depend on how many come at once: a later byte may make those before it invalid.
        """
        return "".join(map(self._pushed, ids))

    def _pushed(self, token: int) -> str:
        if token in self._special:  # however many come, decoding them costs nothing
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = text.rstrip(_INCOMPLETE)
        stray = len(text) - max(self._shown, len(whole)) > _MOST_HELD  # these bytes form no character
        if stray:
            whole = text[:-_LAST_HELD]
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if stray or len(whole) == len(text):
            self._slide(text)
        return new

    def flush(self) -> str:
        """The text held back, at the end; bytes that form no character become U+FFFD."""
        text = self._tokenizer.decode(self._window)
        new, self._shown = text[self._shown :], len(text)
        return new

    def _slide(self, text: str) -> None:
        """Drop the older tokens, cut where the rest alone decodes to the end of the same text."""
        if len(self._window) <= 2 * _KEPT:
            return
        held = len(text) - self._shown
        for kept in range(_KEPT, 2 * _KEPT):
            tail = self._window[-kept:]
            decoded = self._tokenizer.decode(tail)
            if len(decoded) > held and text.endswith(decoded):
                self._shown = len(decoded) - held
                self._window = tail
                return
