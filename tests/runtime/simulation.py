"""A scheduler with a model that computes nothing; its invariants are asserted at every step."""

from dataclasses import dataclass, field

from tests.runtime.block_invariants import check_blocks
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import GenerationRequest
from trtforge.engine_process.retention import KvCacheRetention
from trtforge.formats.attention_windows import window_blocks_for
from trtforge.runtime.scheduling.batch_limits import Batching, BatchLimits
from trtforge.runtime.scheduling.block_table import blocks_behind
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.event_recorder import BlockObserver
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Draft, Sequence
from trtforge.runtime.scheduling.window_blocks import WindowBlocks

ADAPTERS = 2
"""Different adapters that may run at once."""


@dataclass
class Simulation:
    """A scheduler whose model answers every sequence with a token that depends on the sequence alone.

    `window`: of all layers; `partial`: of some layers, which have blocks of their own.
    """

    scheduler: Scheduler
    window: int | None = None
    partial: int | None = None
    admitted: list[int] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    steps: int = 0
    arrivals: int = 0
    rows: list[Row] = field(default_factory=list)
    contents: dict[int, tuple[bytes, list[int]]] = field(default_factory=dict)
    """Salt and tokens up to the last one in each block, of either memory."""
    window_contents: dict[int, tuple[bytes, list[int]]] = field(default_factory=dict)
    """As `contents`, of window blocks."""

    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        adapter: int = 0,
        priority: float = 0.5,
        retention: KvCacheRetention | None = None,
        salt: str | None = None,
    ) -> Sequence:
        request = GenerationRequest(
            str(self.arrivals),
            tuple(prompt),
            max_tokens,
            lora_task_id=adapter or None,
            priority=priority,
            kv_retention=retention,
            cache_salt=salt,
        )
        limits = self.scheduler.limits
        sequence = Sequence.of(request, self.arrivals, limits.max_seq_len, lambda output: None)
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, drafts: int = 0) -> None:
        scheduler = self.scheduler
        for sequence in scheduler.running:
            sequence.draft = Draft((999,) * drafts)  # never right
        ran, pauses = list(scheduler.running), scheduler.pauses
        rows = self.rows = scheduler.schedule()
        self.steps += 1
        self.check(rows)
        self.check_order(ran, pauses)
        self.compute(rows, paused=scheduler.pauses > pauses)
        self.admitted.extend(sequence.order for sequence in scheduler.running)
        for row in rows:
            scheduler.complete(row)
            sequence = row.sequence
            if row.samples:
                reason = sequence.finish_with(1000 + (sequence.order + sequence.generated) % 3)
                if reason:
                    scheduler.finish(sequence, reason)
                    self.finished.append(sequence)

    def check(self, rows: list[Row]) -> None:
        scheduler, limits = self.scheduler, self.scheduler.limits
        assert len(rows) <= limits.max_batch_size
        assert sum(row.count for row in rows) <= limits.max_num_tokens
        assert len({row.sequence for row in rows}) == len(rows)
        assert len({sequence.adapter for sequence in scheduler.running} - {0}) <= ADAPTERS
        assert sum(row.count + len(row.drafts) for row in rows) <= limits.max_num_tokens
        assert [row.count > 1 for row in rows] == sorted(row.count > 1 for row in rows)
        blocks = scheduler.blocks
        for row in rows:
            assert blocks.missing(row.sequence.table, row.start + row.count) == 0
            if self.window is not None:
                assert row.sequence.table.dropped * blocks.tokens_per_block <= max(0, row.start - self.window + 1)
        check_blocks(scheduler.blocks, (sequence.table for sequence in scheduler.holders()))

    def compute(self, rows: list[Row], *, paused: bool) -> None:
        """Write the rows' tokens to their blocks; every block that they attend to must have its own contents."""
        blocks = self.scheduler.blocks
        size, copies = blocks.tokens_per_block, blocks.take_copies()
        self.contents |= {target: self.contents[source] for source, target in copies}
        if not paused:
            held = {block for each in self.scheduler.holders() for block in each.table.blocks[each.table.dropped :]}
            back = {target for source, target in copies if source >= blocks.num_blocks > target}
            assert back <= held | self.wanted(), "a block came back that nothing attends to"
        windows = blocks.windows
        if windows is not None:
            self.window_contents |= {target: self.window_contents[source] for source, target in windows.take_copies()}
        for row in rows:
            table = row.sequence.table
            self.read_and_write(row, self.contents, table.blocks, table.dropped)
            if windows is not None:
                numbers = windows.numbers[table.blocks].tolist()
                assert self.partial is not None
                first = max(0, row.start - self.partial + 1) // size
                self.read_and_write(row, self.window_contents, numbers, first)

    def wanted(self) -> set[int]:
        """The blocks that were restored for the first waiting sequence, whose others follow."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        if scheduler.most_restored is None or not scheduler.waiting:
            return set()
        first = scheduler.waiting[0]
        prefix = blocks.find_prefix(first.tokens, first.table.salt)
        behind = 0
        if blocks.window is not None and first.group is None:
            behind = blocks_behind(blocks.window, len(prefix) * blocks.tokens_per_block, blocks.tokens_per_block)
        return {block for block in prefix.blocks[behind:] if block is not None}

    def read_and_write(
        self, row: Row, contents: dict[int, tuple[bytes, list[int]]], blocks: list[int], first: int
    ) -> None:
        """Of `blocks`, which hold the row's sequence: those from the `first` on are attended to."""
        tokens, salt, size = row.sequence.tokens, row.sequence.table.salt, self.scheduler.blocks.tokens_per_block
        for index in range(first, -(-row.start // size)):
            end = min((index + 1) * size, row.start)
            known_salt, known = contents[blocks[index]]
            assert (known_salt, known[:end]) == (salt, tokens[:end])
        for index in range(row.start // size, -(-(row.start + row.count) // size)):
            contents[blocks[index]] = salt, tokens[: min((index + 1) * size, row.start + row.count)]

    def check_order(self, ran: list[Sequence], pauses: int) -> None:
        """No waiting sequence was overtaken, and the last of those that `ran` were paused."""
        scheduler = self.scheduler
        for queue in (scheduler.waiting, scheduler.running):
            assert [each.precedence for each in queue] == sorted(each.precedence for each in queue)
        if scheduler.waiting:
            first = scheduler.waiting[0].precedence
            assert all(each.precedence < first for each in scheduler.running if each not in ran and not each.held_back)
        stopped = [each.precedence for each in ran if each in scheduler.waiting]
        assert len(stopped) <= scheduler.pauses - pauses
        if stopped:
            assert all(each.precedence < min(stopped) for each in ran if each in scheduler.running)

    def run(self, limit: int = 5000) -> None:
        while not self.scheduler.idle:
            assert self.steps < limit, "the scheduler makes no progress"
            self.step()


def simulation(
    *,
    blocks: int = 64,
    size: int = 4,
    batch: int = 4,
    num_tokens: int = 32,
    policy: SchedulerPolicy = "guaranteed_no_evict",
    chunked: bool = False,
    batching: Batching = "inflight",
    reuse: bool = True,
    window: int | None = None,
    host_blocks: int = 0,
    partial: int | None = None,
    observer: BlockObserver | None = None,
) -> Simulation:
    """`window`: of all layers; `partial`: of some."""
    windows, padded = None, batching == "static_padded"  # as `new_scheduler`
    if partial is not None:
        count = window_blocks_for(partial, size, batch, num_tokens)
        windows = WindowBlocks(count, partial + padded, size, blocks)
    manager = BlockManager(
        blocks,
        size,
        reuse=reuse,
        window=None if window is None else window + padded,
        host_blocks=host_blocks,
        windows=windows,
        observer=observer,
    )
    limits = BatchLimits(max_batch_size=batch, max_num_tokens=num_tokens, max_input_len=32, max_seq_len=48)
    scheduler = Scheduler(
        limits, manager, policy=policy, chunked_context=chunked, batching=batching, most_adapters=ADAPTERS
    )
    return Simulation(scheduler, window, partial)
