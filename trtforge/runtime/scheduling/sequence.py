"""A request while the engine works on it: its tokens, how many of them are computed, and its KV blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trtforge.engine_process.requests import FinishReason, GenerationRequest, Output
from trtforge.runtime.scheduling.blocks import BlockTable


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state, owned by the engine's thread. `order`: order of arrival; `limit`: maximum length of prompt and
    output; `plain`: sampling is the argmax of the unmodified logits.

    The keys and values of the first `computed` tokens are in the cache; the others, which include the last generated
    token, are still to be computed.
    """

    request: GenerationRequest
    order: int
    limit: int
    on_output: Callable[[Output], None]
    tokens: list[int]
    plain: bool
    computed: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    finish_reason: FinishReason | None = None
    cumulative_log_prob: float = 0.0
    reused_blocks: int = 0
    allocated_blocks: int = 0

    @classmethod
    def of(
        cls, request: GenerationRequest, order: int, max_seq_len: int, on_output: Callable[[Output], None]
    ) -> "Sequence":
        """A new sequence; its output is clipped so that prompt and output fit `max_seq_len`."""
        limit = min(len(request.prompt) + request.max_tokens, max_seq_len)
        plain = request.sampling.plain and not request.bad_words
        return cls(request, order, limit, on_output, list(request.prompt), plain)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the cache: 1 in the generation phase."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def most_cached(self) -> int:
        """Maximum number of cached tokens: the last generated token is never fed back."""
        return self.limit - 1

    def finish_with(self, token: int) -> FinishReason | None:
        """Append a generated token (not an end id); returns the finish reason if the sequence ends with it."""
        request = self.request
        if token in request.end_ids:
            return "end_id"
        self.tokens.append(token)
        if request.stop_words and self._ends_with_stop_word():
            return "stop_word"
        return "length" if len(self.tokens) >= self.limit else None

    def _ends_with_stop_word(self) -> bool:
        made = self.generated
        return any(
            0 < len(word) <= made and tuple(self.tokens[-len(word) :]) == word for word in self.request.stop_words
        )
