"""The grammars of running sequences: compiled on another thread, applied to all logits of a step together."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtforge.core.errors import ForgeError, RequestError
from trtforge.runtime.guidance.grammars import Grammars, require_xgrammar
from trtforge.runtime.scheduling.sequence import Sequence

OnPrepared = Callable[[Sequence, ForgeError | None], None]
_LOG = logging.getLogger(__name__)
_LONGEST_STEP = 0.5  # seconds for the masks of a step; a row that takes longer by itself ends
_CLOSE_TIMEOUT = 10.0  # seconds that a grammar's compilation may take before it is abandoned


@dataclass(eq=False, slots=True)
class _Place:
    """A sequence's position in its grammar, after `accepted` generated tokens. `text_ends`: end ids that are also text.
    `lost`: a token did not fit. `slow`: a step took too long."""

    matcher: Any
    text_ends: list[int]
    accepted: int = 0
    lost: bool = False
    slow: bool = False


class Guides:
    """The guides of one engine's sequences. Everything but compilation runs on the engine's thread.

    A sequence's position depends on its tokens only, so pauses do not change it.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """`directory`: of the tokenizer, which is read for the first guide."""
        self._grammars = Grammars(directory, vocab_size)
        self._vocab_size = vocab_size
        self._places: dict[Sequence, _Place] = {}
        self._preparing: set[Sequence] = set()
        self._masks = torch.empty(0)
        self._batch: Any = None
        self._watches = False
        self._work: queue.SimpleQueue[tuple[Sequence, OnPrepared] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, sequence: Sequence, on_prepared: OnPrepared) -> bool:
        """Returns whether the sequence can run now. If not, another thread calls `on_prepared` with an error or None.

        Compiling a large schema takes as long as many steps.
        """
        assert sequence.request.guide is not None
        grammar = self._grammars.found(sequence.request.guide)
        if grammar is not None:
            self._begin(sequence, grammar)
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="trtforge-guides", daemon=True)
            self._thread.start()
        self._preparing.add(sequence)
        self._work.put((sequence, on_prepared))
        return False

    @property
    def preparing(self) -> int:
        """Number of sequences that wait for their guide's compilation. Any thread may call it."""
        return sum(sequence.finish_reason is None for sequence in list(self._preparing))

    def rows(self, rows: list[Sequence]) -> list[int]:
        """Indices of the rows that have a guide."""
        return [index for index, row in enumerate(rows) if row.request.guide is not None]

    def mask(self, rows: list[Sequence], guided: list[int], logits: Tensor) -> None:
        """Set the logits (rows, vocabulary) of tokens that the `guided` rows' grammars forbid to -infinity."""
        places = [self._places[rows[index]] for index in guided]
        masks = self._space(len(rows))
        began = perf_counter()
        if self._watches:
            self._fill_each(rows, guided, masks)
        else:
            self._follow([rows[index] for index in guided], places)
            self._batch.batch_fill_next_token_bitmask([place.matcher for place in places], masks, guided)
        self._watches = perf_counter() - began > _LONGEST_STEP
        for index, place in zip(guided, places, strict=True):
            if place.lost or place.slow:
                masks[index] = 0
            elif place.text_ends:
                _allow_ends(masks[index], place)
        _refuse(logits, masks, self._vocab_size, guided)

    def stuck(self, sequence: Sequence) -> RequestError:
        """The error for a sequence without a possible next token."""
        place = self._places.get(sequence)
        if place is None:
            return no_token_left()
        if place.slow:
            return RequestError(
                "the guide takes too long to check at each token",
                hint="Use a less ambiguous guide, with fewer ways to match a text.",
            )
        return RequestError(
            "the guide and the other options together exclude all tokens",
            hint="Leave out bad words and min_tokens, or correct the guide if no output can match it.",
        )

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._places.pop(sequence, None)

    def close(self) -> None:
        """End the thread. No sequence is prepared afterwards."""
        if self._thread is not None:
            self._work.put(None)
            self._grammars.close()
            self._thread.join(_CLOSE_TIMEOUT)

    def _compile(self) -> None:
        while (work := self._work.get()) is not None:
            sequence, on_prepared = work
            # Not compiled if it was cancelled while it waited for other compilations.
            error = None if sequence.finish_reason is not None else self._compile_for(sequence)
            self._preparing.discard(sequence)
            on_prepared(sequence, error)

    def _compile_for(self, sequence: Sequence) -> RequestError | None:
        """Compile a sequence's guide; returns the error if that fails."""
        try:
            require_xgrammar()
            assert sequence.request.guide is not None
            self._begin(sequence, self._grammars.compiled(sequence.request.guide))
        except ForgeError as failure:
            return RequestError(failure.message, hint=failure.hint)
        except Exception as failure:
            _LOG.exception("the guide of request %s failed", sequence.request.request_id)
            return RequestError(f"the guide cannot be compiled: {failure!r}"[:300], hint="See the server's log.")
        return None

    def _begin(self, sequence: Sequence, grammar: Any) -> None:
        import xgrammar

        ends = sorted(token for token in sequence.request.end_ids if 0 <= token < self._vocab_size)
        matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=ends)
        self._places[sequence] = _Place(matcher, self._grammars.with_text(ends))

    def _follow(self, rows: list[Sequence], places: list[_Place]) -> None:
        """Let the matchers accept the tokens generated since the last call, usually one per row."""
        if self._batch is None:
            import xgrammar

            self._batch = xgrammar.BatchGrammarMatcher()
        behind = list(zip(rows, places, strict=True))
        while behind := [(row, place) for row, place in behind if place.accepted < row.generated and not place.lost]:
            tokens = [row.tokens[len(row.request.prompt) + place.accepted] for row, place in behind]
            fits = self._batch.batch_accept_token([place.matcher for _, place in behind], tokens)
            for (_, place), fit in zip(behind, fits, strict=True):
                place.accepted += 1
                place.lost = not fit

    def _fill_each(self, rows: list[Sequence], guided: list[int], masks: Tensor) -> None:
        """Fill the masks row by row, to find and end the slow row after a step that took too long."""
        for index in guided:
            row, place = rows[index], self._places[rows[index]]
            began = thread_time()
            while place.accepted < row.generated and not place.lost:
                place.lost = not place.matcher.accept_token(row.tokens[len(row.request.prompt) + place.accepted])
                place.accepted += 1
            place.matcher.fill_next_token_bitmask(masks, index)
            place.slow = thread_time() - began > _LONGEST_STEP

    def _space(self, rows: int) -> Tensor:
        """Memory for the masks of `rows` rows: int32, one bit per token."""
        if len(self._masks) < rows:
            from xgrammar import allocate_token_bitmask

            self._masks = allocate_token_bitmask(max(rows, 2 * len(self._masks)), self._vocab_size)
        return self._masks[:rows]


def no_token_left() -> RequestError:
    """The error for an unguided sequence without a possible next token."""
    hint = "Leave out bad words, min_tokens, no_repeat_ngram_size, the bias or the logits processor."
    return RequestError("the options of the request exclude all tokens", hint=hint)


def _allow_ends(mask: Tensor, place: _Place) -> None:
    """Allow end ids exactly if the grammar is complete: xgrammar may allow end ids with text within the text."""
    octets, complete = mask.numpy().view(np.uint8), place.matcher.is_completed()
    for token in place.text_ends:
        bit = np.uint8(1 << token % 8)
        octets[token // 8] = octets[token // 8] | bit if complete else octets[token // 8] & ~bit


def _refuse(logits: Tensor, masks: Tensor, vocab_size: int, rows: list[int]) -> None:
    """Set the logits of tokens whose mask bit is 0 to -infinity. On CPUs xgrammar's own function is slower."""
    if logits.device.type != "cpu":
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, masks.to(logits.device), vocab_size=vocab_size, indices=rows)
        return
    numbers, octets = logits.numpy()[:, :vocab_size], masks.numpy().view(np.uint8)
    for part in [slice(None)] if len(rows) == len(numbers) else rows:
        refused = np.unpackbits(~octets[part], axis=-1, count=vocab_size, bitorder="little")
        np.copyto(numbers[part], -np.inf, where=refused.view(np.bool_))
