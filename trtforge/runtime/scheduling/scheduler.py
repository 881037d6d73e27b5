"""In-flight batching: which tokens of which sequences the next step computes. Needs no torch.

A step contains at most `max_batch_size` sequences and `max_num_tokens` tokens: first one token of every sequence in the
generation phase, then context chunks. Within a priority, sequences run first come, first served; no later one overtakes
a waiting one. TensorRT-LLM orders its queue the same way (`insertRequestInOrder`, cpp/tensorrt_llm/executor/
requestUtils.cpp), and `max_utilization` pauses the last ones of that order (batch_manager/capacityScheduler.cpp).
"""

from collections.abc import Iterable
from dataclasses import replace

from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import FinishReason
from trtforge.runtime.scheduling.batch_limits import Batching, BatchLimits
from trtforge.runtime.scheduling.block_table import Prefix
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.rows import Row, packing_order
from trtforge.runtime.scheduling.sequence import Draft, Group, Sequence, insert

_MOST_SCORED, _MOST_DRAFTED = 512, 1024
"""Maximum prompt tokens, and draft tokens, whose logits a step keeps: 512 rows of 128,000 logits take 262 MB."""


class Scheduler:
    """Owns the waiting and the running sequences and, through the block manager, their KV blocks."""

    def __init__(
        self,
        limits: BatchLimits,
        blocks: BlockManager,
        *,
        policy: SchedulerPolicy = "guaranteed_no_evict",
        chunked_context: bool = False,
        batching: Batching = "inflight",
        most_adapters: int = 0,
    ) -> None:
        """`most_adapters`: maximum number of different LoRA adapters that run at once."""
        self.limits = limits
        self.blocks = blocks
        self.pauses = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """`waiting` and `running` are sorted by precedence."""
        self.most_context: int | None = None
        """Maximum context tokens of a step with at least as many generating sequences as prompts to compute."""
        self.most_restored: int | None = None
        """Maximum blocks that such a step restores from host memory or the store."""
        self.restored = 0
        """Number of blocks that the last call of `schedule` restored."""
        self.copied = 0
        """How many of these the step's copies restore from host memory; the others were read from the store."""
        self._chunked = chunked_context
        self._static = batching != "inflight"
        self._guaranteed = policy == "guaranteed_no_evict" or self._static
        self._pads = batching == "static_padded"
        self._padding: list[Sequence] = []
        self._most_adapters = most_adapters
        self._max_batch_size = min(limits.max_batch_size, limits.max_num_tokens)

    @property
    def idle(self) -> bool:
        """Whether no sequence is running or waiting."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, sorted by its priority and arrival."""
        insert(self.waiting, sequence)

    def schedule(self) -> list[Row]:
        """Allocate blocks for the next step and return its rows, sorted by `packing_order`."""
        self.restored = self.copied = 0
        return self._scheduled() or self._scheduled()  # the first call may only admit a group's last member

    def _scheduled(self) -> list[Row]:
        pauses, size = self.pauses, self.blocks.tokens_per_block
        for sequence in self.running:
            if (len(sequence.table.blocks) - 1) * size >= len(sequence.tokens):
                sequence.allocated_blocks -= self.blocks.trim(sequence.table, len(sequence.tokens))
        rows: dict[Sequence, Row] = {}
        contexts = [sequence for sequence in self.running if sequence.remaining > 1]
        if not (self._static and contexts):
            for sequence in [s for s in self.running if s.remaining == 1 and (not s.group or self._generates(s.group))]:
                count = len(sequence.tokens)
                if count >= sequence.limit:  # its last token is being computed
                    continue
                if count <= len(sequence.table.blocks) * size or self._allocate(sequence, count, rows):
                    rows[sequence] = Row(sequence, sequence.computed, 1, samples=True)
            for sequence in self._padding:
                rows[sequence] = Row(sequence, sequence.computed - 1, 1, samples=False)
        budget = self.limits.max_num_tokens - len(rows)
        prompts = len(contexts) + min(len(self.waiting), self._max_batch_size - len(self.running))
        is_paced = prompts <= len(rows)
        if self._chunked and self.most_context is not None and is_paced:
            budget = min(budget, self.most_context)
        for sequence in contexts:
            budget -= self._add_context(sequence, budget, rows)
        if self.pauses == pauses:
            self._admit(budget, rows, self.most_restored if is_paced else None)
        self._add_drafts(rows)
        return sorted(rows.values(), key=packing_order)

    def complete(self, row: Row) -> None:
        """Record that a row was computed: its keys and values are in the cache. Drafts count when they are accepted."""
        if row.sequence.finish_reason is None:
            self._advance(row.sequence, row.start + row.count)

    def accept(self, sequence: Sequence) -> None:
        """Record that the token before the sequence's last one was a computed draft."""
        self._advance(sequence, sequence.computed + 1)

    def _advance(self, sequence: Sequence, computed: int) -> None:
        sequence.computed = computed
        if computed // self.blocks.tokens_per_block > len(sequence.table.keys):
            self.blocks.seal(sequence.table, sequence.tokens, computed)
            self._drop(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a running or waiting sequence and free its blocks."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
            if self._pads and sequence.computed:
                self.blocks.trim(sequence.table, sequence.computed)
                self._padding.append(sequence)
            else:
                self.blocks.release(sequence.table)
        elif sequence in self.waiting:  # else its grammar is still being compiled
            self.waiting.remove(sequence)
        if not self.running:
            for padding in self._padding:
                self.blocks.release(padding.table)
            self._padding.clear()

    def fork(self, sequence: Sequence, others: list[Sequence]) -> None:
        """Let new sequences with the same computed tokens share its blocks; they wait if there is no room."""
        table = sequence.table
        if (len(table.blocks) - len(table.keys)) * len(others) > self.blocks.free_blocks:
            for other in others:
                self.add(other)
            return
        self.blocks.fork([table, *(other.table for other in others)], [0] * (1 + len(others)))
        for other in others:
            other.computed = sequence.computed
            insert(self.running, other)

    def join(self, sequence: Sequence, copies: list[Sequence]) -> list[Sequence]:
        """Let `copies` share the blocks of `sequence`, whose prompt was just computed; copies without room wait.

        Returns the copies that run, at the same position as `sequence`.
        """
        joined: list[Sequence] = []
        shared, slots = len(sequence.table.keys), len(self.running) + sum(s.members_to_come for s in self.running)
        free = self.blocks.free_blocks - self._reserved()
        if self.blocks.window is not None:  # its shared blocks stop being its own: see BlockManager.still_needed
            free -= shared - sequence.table.dropped
        for copy in copies:
            tokens = copy.most_cached if self._guaranteed else len(copy.tokens)
            free -= self.blocks.most_held(tokens) - (shared if self.blocks.window is None else 0)
            if self._static or free < 0 or slots + len(joined) >= self._max_batch_size:
                self.add(copy)
            else:
                joined.append(copy)
        self.fork(sequence, joined)
        for copy in joined:
            copy.begin()
            copy.reused_blocks, copy.allocated_blocks = shared, len(copy.table.blocks)
            copy.cached_tokens = sequence.cached_tokens
        return joined

    def holders(self) -> Iterable[Sequence]:
        """Every sequence that may hold blocks."""
        return [*self.running, *self.waiting, *self._padding]

    def _admit(self, budget: int, rows: dict[Sequence, Row], most_restored: int | None) -> None:
        if self._static and self.running:
            return
        while self.waiting:
            sequence = self._next()
            slots = len(self.running) + sum(each.members_to_come for each in (*self.running, sequence))
            if slots >= self._max_batch_size or not self._has_adapter(sequence):
                return
            prefix = (
                Prefix() if sequence.scores_prompt else self.blocks.find_prefix(sequence.tokens, sequence.table.salt)
            )
            context = len(sequence.tokens) - len(prefix) * self.blocks.tokens_per_block
            if not self._static and (budget < 1 or (budget < context and not self._may_chunk(sequence))):
                return
            spare = 0 if self._guaranteed or sequence.held_back else len(self.running)
            if self._needed(sequence, prefix) + spare > self.blocks.free_blocks - self._reserved():
                if not self._makes_way(sequence, rows):
                    return
                continue
            restored = self.blocks.restored_by(prefix, drops=sequence.group is None)
            left = len(restored) if most_restored is None else max(0, most_restored - self.restored)
            if sequence.restores_in_parts(len(restored), left):
                self._count_restored(prefix, restored[:left])
                if self.blocks.preload(sequence.table, prefix, restored[:left]):
                    return  # the next steps restore the others
                most_restored = None  # a block cannot be read
                continue
            self._count_restored(prefix, restored)
            self.waiting.remove(sequence)
            self.blocks.share(sequence.table, prefix, drops=sequence.group is None, counts=not sequence.begun)
            reused = len(sequence.table.blocks)
            sequence.computed = reused * self.blocks.tokens_per_block
            if not sequence.begun:  # a paused sequence finds its own blocks again
                sequence.reused_blocks = sequence.allocated_blocks = reused
                sequence.cached_tokens = sequence.computed
            insert(self.running, sequence)
            sequence.begin()
            budget -= self._add_context(sequence, budget, rows)

    def _count_restored(self, prefix: Prefix, indices: list[int]) -> None:
        """Count the blocks at these indices, before they are restored."""
        self.restored += len(indices)
        self.copied += sum(self.blocks.host.holds(prefix.keys[index]) for index in indices)

    def _needed(self, sequence: Sequence, prefix: Prefix) -> int:
        """Maximum number of free blocks that a waiting sequence with this prefix, and its group, may take."""
        tokens = sequence.most_cached if self._guaranteed else len(sequence.tokens)
        shared = prefix.held
        most = self.blocks.blocks_for(tokens) * (1 + sequence.members_to_come)
        if self.blocks.window is None:
            return most - shared
        if sequence.group is None:
            most = self.blocks.most_held(tokens)
        return max(most, len(prefix) - shared) + shared

    def _may_take(self, sequence: Sequence, tokens: int) -> int:
        """Number of free blocks that a running sequence may take until it has this many tokens."""
        if self.blocks.window is None or sequence.group is not None:
            return self.blocks.missing(sequence.table, tokens)
        return self.blocks.still_needed(sequence.table, tokens)

    def _drop(self, sequence: Sequence) -> None:
        """Free the blocks behind the window. Groups keep them, because members share blocks in changing ways."""
        if sequence.group is None:
            self.blocks.drop(sequence.table, sequence.computed)

    def _most_context(self, sequence: Sequence) -> int:
        """Maximum context tokens for which there are blocks now. Dropping blocks makes room for the next chunk."""
        if self.blocks.window is None or sequence.group is not None:
            return sequence.remaining
        free = max(1, self.blocks.free_blocks)
        if self._guaranteed:
            others = self._reserved() - self._may_take(sequence, sequence.most_cached)
            free = max(0, self.blocks.free_blocks - others)
        return (len(sequence.table.blocks) + free) * self.blocks.tokens_per_block - sequence.computed

    def _next(self) -> Sequence:
        """The next sequence to admit: a member missing from a partly running group, else the first waiting one."""
        if any(each.held_back for each in self.running):
            for sequence in self.waiting:
                if sequence.group is not None and any(each in self.running for each in sequence.group.members):
                    return sequence
        return self.waiting[0]

    def _makes_way(self, sequence: Sequence, rows: dict[Sequence, Row]) -> bool:
        """Pause a running sequence of lower priority for a waiting one that lacks blocks; returns whether it did."""
        if self._guaranteed or not self.running or self.running[-1].request.priority >= sequence.request.priority:
            return False
        for paused in self._pause(self.running[-1]):
            rows.pop(paused, None)
        return True

    def _has_adapter(self, sequence: Sequence) -> bool:
        """Whether the sequence needs no further adapter, or a further one may be in use."""
        used = {each.adapter for each in self.running if each.adapter}
        return not sequence.adapter or sequence.adapter in used or len(used) < self._most_adapters

    def _add_context(self, sequence: Sequence, budget: int, rows: dict[Sequence, Row]) -> int:
        """Schedule the next chunk of a sequence's context; returns its number of tokens."""
        count = min(sequence.remaining - sequence.held_back, budget, self._most_context(sequence))
        if sequence.scores_prompt:
            count = min(count, _MOST_SCORED - sum(row.count for row in rows.values() if row.scores))
        if count < sequence.remaining:
            if not self._may_chunk(sequence):
                return 0
            size = self.blocks.tokens_per_block
            if count >= size:
                count -= (sequence.computed + count) % size
        if count < 1 or not self._allocate(sequence, sequence.computed + count, rows):
            return 0
        samples = count == sequence.remaining
        rows[sequence] = Row(sequence, sequence.computed, count, samples, scores=sequence.scores_prompt)
        return count

    def _add_drafts(self, rows: dict[Sequence, Row]) -> None:
        """Add drafts to the rows as far as tokens and free blocks allow; no sequence waits or is paused for them."""
        budget = min(_MOST_DRAFTED, self.limits.max_num_tokens - sum(row.count for row in rows.values()))
        for sequence, row in rows.items():
            if not sequence.draft.tokens:
                continue
            room, end = 0, row.start + row.count
            if row.samples and not row.scores and (row.count == 1 or not sequence.draft.parents):
                size = self.blocks.tokens_per_block
                held = (len(sequence.table.blocks) + self.blocks.free_blocks) * size
                room = max(0, min(budget, min(sequence.slots(size), held) - end))
            sequence.draft = sequence.draft.first(room)
            drafts = sequence.draft.tokens
            sequence.allocated_blocks += self.blocks.missing(sequence.table, end + len(drafts))
            self.blocks.extend(sequence.table, end + len(drafts))
            rows[sequence] = replace(row, drafts=drafts, parents=sequence.draft.parents)
            budget -= len(drafts)

    def _may_chunk(self, sequence: Sequence) -> bool:
        """Whether the context may be chunked: always after a pause, as it may have outgrown max_num_tokens, and when
        the prompt's logits are wanted, as they take memory."""
        return self._chunked or sequence.generated > 0 or sequence.scores_prompt

    def _allocate(self, sequence: Sequence, tokens: int, rows: dict[Sequence, Row]) -> bool:
        """Allocate blocks for the sequence's first `tokens` tokens. While too few are free, pause the last running
        sequence, the newest of the lowest priority. Returns False if this sequence itself is paused."""
        if sequence not in self.running:
            return False
        missing = self.blocks.missing(sequence.table, tokens)
        while missing > self.blocks.free_blocks:
            assert not self._guaranteed, "guaranteed_no_evict ran out of reserved blocks"
            paused = self._pause(self.running[-1])
            for member in paused:
                rows.pop(member, None)
            if sequence in paused:
                return False
        if missing:
            self.blocks.extend(sequence.table, tokens)
            sequence.allocated_blocks += missing
        return True

    def _pause(self, sequence: Sequence) -> list[Sequence]:
        """Free the blocks of a running sequence and its group, and queue them to be computed again. Returns them."""
        self.pauses += 1
        members = sequence.group.members if sequence.group is not None else [sequence]
        paused = [member for member in members if member in self.running]
        for member in paused:
            self.running.remove(member)
            self.add(member)
            member.computed, member.draft = 0, Draft()
        for member in reversed(paused):
            self.blocks.release(member.table)
        return paused

    def _generates(self, group: Group) -> bool:
        """Whether all members are running and each has only its last token left to compute."""
        return all(member.remaining == 1 and member in self.running for member in group.members)

    def _reserved(self) -> int:
        """Number of blocks that running sequences may still need."""
        if not self._guaranteed:
            tokens = ((s, len(s.tokens)) for s in self.running)
            return sum(min(self.blocks.missing(s.table, count), self._may_take(s, count)) for s, count in tokens)
        missing = sum(self._may_take(s, s.most_cached) for s in self.running)
        return missing + sum(s.members_to_come * self.blocks.blocks_for(s.most_cached) for s in self.running)
