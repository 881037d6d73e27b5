"""Drafts from a smaller model, which the engine runs with a separate KV cache."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.source import Source
from trtforge.runtime.sampler import Sampler, drawn
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.rows import Row, packing_order
from trtforge.runtime.scheduling.sequence import Draft, Sequence


@dataclass(eq=False, slots=True)
class _Mirror:
    """A sequence as the draft model sees it. `settled`: tokens that will not change."""

    own: Sequence
    settled: int = 0
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    wanted: int = 0


class DraftModel:
    """Proposes the draft model's most likely tokens, or its samples together with their distributions."""

    def __init__(self, source: Source, ranks: RankGroup, tokens: int) -> None:
        self._limits = source.limits
        self._ranks = ranks
        self._tokens = tokens
        self._blocks = BlockManager(ranks.num_blocks, source.tokens_per_block)
        self._sampler = Sampler(source.config.vocab_size, torch.device(source.forge.device))
        self._mirrors: dict[Sequence, _Mirror] = {}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """See Drafter."""
        return self._ranks.worker_pids

    @property
    def used_blocks(self) -> int:
        """Number of the draft model's KV blocks that sequences hold."""
        return self._blocks.pool.used

    def draft(self, sequences: list[Sequence]) -> None:
        """See Drafter. A sequence for which no block is free, or that is too long, gets no draft."""
        mirrors = {sequence: mirror for sequence in sequences if (mirror := self._prepared(sequence)) is not None}
        active = list(mirrors.values())
        while active:
            logits = self._computed([mirror.own for mirror in active])
            for mirror in active:
                self._propose(mirror, logits[mirror.own])
            active = [mirror for mirror in active if len(mirror.tokens) < mirror.wanted]
        for sequence in sequences:
            found = mirrors.get(sequence)
            if found is None:
                sequence.draft = Draft()
            else:
                sequence.draft = Draft(
                    tuple(found.tokens), torch.stack(found.distributions) if found.distributions else None
                )

    def observe(self, rows: list[Row], logits: Tensor | None) -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        mirror = self._mirrors.pop(sequence, None)
        if mirror is not None:
            self._blocks.release(mirror.own.table)

    def close(self) -> None:
        """See Drafter."""
        self._ranks.close()

    def _prepared(self, sequence: Sequence) -> _Mirror | None:
        """The sequence's mirror, with its tokens and blocks for a draft. Cached tokens that differ are dropped."""
        length = len(sequence.tokens)
        wanted = min(self._tokens, sequence.limit - length - 1, self._limits.max_seq_len - length)
        if wanted < 1 or sequence.virtual is not None:  # it has no prompt tables
            return None
        mirror = self._mirrors.get(sequence)
        if mirror is None:
            request = replace(sequence.request, lora_task_id=None)
            own = Sequence.of(request, sequence.order, sequence.limit, lambda output: None)
            own.tokens[:] = sequence.tokens
            mirror = self._mirrors[sequence] = _Mirror(own)
            prefix = self._blocks.find_prefix(own.tokens, own.table.salt)
            self._blocks.share(own.table, prefix)
            own.computed = mirror.settled = len(prefix) * self._blocks.tokens_per_block
        own = mirror.own
        same = mirror.settled
        while same < min(own.computed, length - 1) and own.tokens[same] == sequence.tokens[same]:
            same += 1
        own.tokens[same:] = sequence.tokens[same:]
        own.computed = mirror.settled = same
        self._blocks.seal(own.table, own.tokens, own.computed)
        if self._blocks.missing(own.table, length + wanted - 1) > self._blocks.free_blocks:
            return None
        self._blocks.extend(own.table, length + wanted - 1)
        mirror.tokens, mirror.distributions, mirror.wanted = [], [], wanted
        return mirror

    def _computed(self, sequences: list[Sequence]) -> dict[Sequence, Tensor]:
        """Compute the tokens that are not computed yet; returns the logits after each sequence's last token."""
        logits: dict[Sequence, Tensor] = {}
        while sequences:
            rows: list[Row] = []
            budget = self._limits.max_num_tokens
            for sequence in sequences:
                count = min(sequence.remaining, budget)
                budget -= count
                if count:
                    rows.append(Row(sequence, sequence.computed, count, samples=count == sequence.remaining))
            rows.sort(key=packing_order)
            found = self._ranks.execute(Step.of_rows(rows))
            sampled = (row.sequence for row in rows if row.samples)
            # The next step may overwrite the logits.
            logits |= dict(zip(sampled, [] if found is None else found.clone(), strict=True))
            for row in rows:
                row.sequence.computed += row.count
            sequences = [sequence for sequence in sequences if sequence.remaining]
        return logits

    def _propose(self, mirror: _Mirror, logits: Tensor) -> None:
        own = mirror.own
        sampling = own.request.sampling
        if sampling.greedy:
            token = int(logits.argmax())
        else:
            distribution = self._sampler.distribution(own, logits)
            self._sampler.forget(own)  # its counts of tokens are those of a draft
            if not float(distribution.sum()) > 0.0:  # bias and bad words leave no token
                mirror.wanted = len(mirror.tokens)
                return
            token = drawn(distribution, sampling.seed or 0, len(own.tokens))
            mirror.distributions.append(distribution)
        mirror.tokens.append(token)
        own.tokens.append(token)
