import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.block_invariants import check_blocks
from tests.runtime.simulation import Simulation, simulation
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.retention import KvCacheRetention, TokenRangeRetention
from trtforge.runtime.scheduling.batch_limits import Batching, BatchLimits
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Group, Sequence

RETENTIONS = st.none() | st.builds(
    lambda border, first, then, end: KvCacheRetention(
        [TokenRangeRetention(0, border, first), TokenRangeRetention(border, end, then, 0)], decode_priority=then
    ),
    border=st.integers(1, 20),
    first=st.sampled_from([0, 29, 35, 80]),
    then=st.sampled_from([20, 60]),
    end=st.sampled_from([None, 24]),
)


def test_generation_goes_before_context_and_long_prompts_are_cut() -> None:
    sim = simulation(num_tokens=8, chunked=True)
    sim.arrive([1] * 4, 8)
    sim.step()
    long = sim.arrive([2] * 20, 4)
    sim.step()
    assert [(row.count, row.samples) for row in sim.rows] == [(1, True), (4, False)]
    sim.step()
    assert [(row.count, row.start) for row in sim.rows if row.sequence is long] == [(4, 4)]


@pytest.mark.parametrize(
    ("pace", "expected"), [(8, [8, 8, 4]), (3, [3, 3, 3, 3, 3, 3, 2]), (6, [4, 4, 4, 4, 4])], ids=str
)
def test_a_prompt_beside_as_many_running_sequences_keeps_to_the_pace(pace: int, expected: list[int]) -> None:
    """Chunks as long as a block end where one ends; shorter ones do not, as each other one would be shorter still."""
    sim = simulation(num_tokens=32, chunked=True)
    sim.scheduler.most_context = pace
    running = [sim.arrive([1] * 4, 12), sim.arrive([2] * 4, 12)]
    sim.step()
    long = sim.arrive([3] * 20, 4)
    chunks = []
    while not long.generated:
        sim.step()
        chunks += [row.count for row in sim.rows if row.sequence is long]
    assert chunks == expected
    assert [each.generated for each in running] == [1 + len(chunks)] * 2


def test_a_chunk_of_one_token_comes_behind_those_that_sample() -> None:
    sim = simulation(num_tokens=32, chunked=True)
    sim.scheduler.most_context = 1
    running = [sim.arrive([1] * 4, 12), sim.arrive([2] * 4, 12)]
    sim.step()
    late = sim.arrive([3] * 9, 4)
    sim.step()
    assert [(row.sequence, row.count, row.samples) for row in sim.rows] == [
        *((each, 1, True) for each in running),
        (late, 1, False),
    ]


def test_prompts_that_outnumber_running_sequences_are_computed_at_once() -> None:
    sim = simulation(num_tokens=32, chunked=True)
    sim.scheduler.most_context = 8
    sim.arrive([1] * 4, 12)
    sim.step()
    prompts = [sim.arrive([number] * 12, 4) for number in (2, 3)]
    sim.step()
    assert [row.count for row in sim.rows] == [1, 12, 12]
    assert all(each.generated for each in prompts)


def test_without_chunked_context_a_prompt_waits_until_it_fits_whole() -> None:
    sim = simulation(num_tokens=16)
    sim.arrive([1] * 4, 3)
    late = sim.arrive([2] * 16, 4)
    while late.computed == 0:
        sim.step()
    assert [(row.count, row.start) for row in sim.rows] == [(16, 0)]


def test_guaranteed_no_evict_admits_only_what_can_finish() -> None:
    sim = simulation(blocks=6, reuse=False)
    for _ in range(3):
        sim.arrive([1] * 4, 9)
    sim.step()
    assert len(sim.rows) == 2
    sim.run()
    assert sim.scheduler.pauses == 0


def test_max_utilization_admits_more_and_pauses_the_newest() -> None:
    sim = simulation(blocks=6, policy="max_utilization", reuse=False)
    sequences = [sim.arrive([1] * 4, 9) for _ in range(3)]
    sim.step()
    assert len(sim.rows) == 3
    sim.run()
    assert sim.scheduler.pauses > 0
    assert [s.order for s in sim.finished] == [0, 1, 2]
    assert all(s.generated == 9 for s in sequences)


def test_blocks_that_a_paused_request_finds_again_are_not_counted_as_reused() -> None:
    sim = simulation(blocks=6, policy="max_utilization")
    first, last = (sim.arrive(list(range(start, start + 8)), 12) for start in (0, 100))
    sim.run()
    assert sim.scheduler.pauses == 1
    assert (first.reused_blocks, last.reused_blocks) == (0, 0)
    assert (first.output().cached_tokens, last.output().cached_tokens) == (0, 0)


def test_a_sequence_tells_when_it_first_ran_also_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(1)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(times))
    sim = simulation(blocks=6, policy="max_utilization")
    first, last, waiting = (sim.arrive([start] * 8, 12) for start in (1, 2, 3))
    assert [each.begun for each in (first, last, waiting)] == [False] * 3
    sim.step()
    assert [each.scheduled_ns for each in (first, last, waiting)] == [1, 2, 0]
    sim.run()
    assert sim.scheduler.pauses == 1
    assert [each.output().scheduled_ns for each in (first, last, waiting)] == [1, 2, 3]


def test_a_shared_prefix_is_not_computed_again() -> None:
    sim = simulation()
    sim.arrive(list(range(12)), 4)
    sim.step()
    second = sim.arrive([*range(12), 7], 4)
    sim.step()
    assert (second.reused_blocks, second.output().cached_tokens) == (3, 12)
    assert [row.count for row in sim.rows if row.sequence is second] == [1]


def test_a_cancelled_sequence_frees_its_blocks_at_once() -> None:
    sim = simulation()
    sequence = sim.arrive([1] * 9, 9)
    sim.step()
    assert sim.scheduler.blocks.pool.used == 3
    sim.scheduler.finish(sequence, "cancelled")
    assert sim.scheduler.blocks.pool.used == 0
    assert sim.scheduler.idle


@pytest.mark.parametrize(("batching", "rows"), [("static_padded", 2), ("static_dropped", 1)])
def test_static_batching_admits_nothing_until_the_longest_is_done(batching: Batching, rows: int) -> None:
    sim = simulation(batch=2, batching=batching)
    sim.arrive([1] * 4, 2)
    longest = sim.arrive([2] * 4, 6)
    waiting = sim.arrive([3] * 4, 2)
    for _ in range(4):
        sim.step()
    assert len(sim.rows) == rows
    assert waiting.computed == 0
    while longest.finish_reason is None:
        sim.step()
    sim.step()
    assert [row.sequence for row in sim.rows] == [waiting]


def test_a_row_that_pads_a_static_batch_holds_no_blocks_of_drafts() -> None:
    """With a window those may be blocks that are reserved for other sequences."""
    sim = simulation(window=4, chunked=True, batching="static_padded")
    first, _ = sim.arrive([1] * 4, 20), sim.arrive([2] * 4, 20)
    for _ in range(2):
        sim.step(drafts=9)
    assert len(first.table.blocks) == 4
    sim.scheduler.finish(first, "cancelled")
    assert (first.computed, len(first.table.blocks)) == (5, 2)
    sim.run()
    assert sim.scheduler.blocks.pool.used == 0


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    blocks=st.integers(12, 40),
    batch=st.integers(1, 6),
    num_tokens=st.sampled_from([32, 40, 64]),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    chunked=st.booleans(),
    reuse=st.booleans(),
    batching=st.sampled_from(["inflight", "inflight", "static_padded", "static_dropped"]),
    priorities=st.sampled_from([[0.5], [0.0, 0.5, 1.0]]),
    window=st.sampled_from([None, 2, 3, 8, 17, 40]),
    everywhere=st.booleans(),
    host_blocks=st.sampled_from([0, 0, 3, 30]),
)
def test_under_any_load_every_request_finishes_in_order_of_priority_and_arrival(
    data: st.DataObject,
    blocks: int,
    batch: int,
    num_tokens: int,
    policy: SchedulerPolicy,
    chunked: bool,
    reuse: bool,
    batching: Batching,
    priorities: list[float],
    window: int | None,
    everywhere: bool,
    host_blocks: int,
) -> None:
    """`everywhere`: all layers have the window, else some, with blocks of their own."""
    sim = simulation(
        window=window if chunked and everywhere else None,
        partial=None if everywhere or host_blocks else window,
        host_blocks=host_blocks,
        blocks=blocks,
        batch=batch,
        num_tokens=8 if chunked else num_tokens,
        policy=policy,
        chunked=chunked,
        reuse=reuse,
        batching=batching,
    )
    draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
    sim.scheduler.most_context = draw(st.sampled_from([None, 0, 1, 5]))
    sim.scheduler.most_restored = draw(st.sampled_from([None, 0, 1, 3]))
    sequences: list[Sequence] = []
    cancelled: set[int] = set()
    for _ in range(draw(st.integers(1, 25))):
        match draw(st.integers(0, 3)):
            case 0 | 1:
                flavour, length = draw(st.integers(0, 1)), draw(st.integers(1, 32))
                adapter, priority = draw(st.integers(0, 3)), draw(st.sampled_from(priorities))
                tokens, retention, salt = draw(st.integers(1, 48)), draw(RETENTIONS), draw(st.sampled_from([None, "a"]))
                sequences.append(sim.arrive([flavour] * length, tokens, adapter, priority, retention, salt))
            case 2 if sequences:
                victim = sequences[draw(st.integers(0, len(sequences) - 1))]
                if victim.finish_reason is None:
                    cancelled.add(victim.order)
                sim.scheduler.finish(victim, "cancelled")
            case _:
                sim.step(draw(st.integers(0, 9)) if batching == "inflight" else 0)
    sim.run()
    if policy == "guaranteed_no_evict":
        assert sim.scheduler.pauses == 0
    check_blocks(sim.scheduler.blocks, [])
    assert sim.scheduler.blocks.free_blocks == blocks
    assert sim.scheduler.blocks.windows is None or sim.scheduler.blocks.windows.used == 0
    for sequence in sequences:
        if sequence.order in cancelled:
            assert sequence.finish_reason == "cancelled"
        else:
            assert sequence.finish_reason == "length"
            assert len(sequence.tokens) == sequence.limit
    admissions = list(dict.fromkeys(sim.admitted))
    if len(priorities) == 1:
        assert admissions == sorted(admissions), "a later request was admitted before an earlier one"


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_waiting_request_of_higher_priority_runs_first_and_takes_no_place_of_a_running_one(
    policy: SchedulerPolicy,
) -> None:
    sim = simulation(batch=1, policy=policy)
    running, low, high = sim.arrive([1] * 4, 4), sim.arrive([2] * 4, 4, priority=0), sim.arrive([3] * 4, 4)
    sim.step()
    higher = sim.arrive([4] * 4, 4, priority=1)
    sim.run()
    assert sim.finished == [running, higher, high, low]
    assert sim.scheduler.pauses == 0


def test_max_utilization_pauses_the_lowest_priority_for_running_and_for_waiting_requests() -> None:
    sim = simulation(blocks=6, policy="max_utilization", reuse=False)
    low = sim.arrive([1] * 4, 9, priority=0.1)
    normal = sim.arrive([2] * 4, 9)
    sim.step()
    assert sim.scheduler.running == [normal, low]
    high = sim.arrive([3] * 12, 9, priority=0.9)
    sim.step()
    assert (sim.scheduler.running, sim.scheduler.waiting) == ([high, normal], [low])
    assert low.computed == 0
    sim.run()
    assert sim.finished[-1] is low
    assert [len(each.tokens) for each in (low, normal, high)] == [13, 13, 21]


@pytest.mark.parametrize(("policy", "blocks"), [("guaranteed_no_evict", 6), ("max_utilization", 7)])
def test_sequences_longer_than_the_cache_run_side_by_side_within_their_windows(
    policy: SchedulerPolicy, blocks: int
) -> None:
    """A window of 8 tokens is 2 blocks of 4, and one more in part, so that 6 hold two sequences of 12 blocks each.

    `max_utilization` keeps a block to spare for each running sequence.
    """
    sim = simulation(blocks=blocks, num_tokens=16, policy=policy, chunked=True, reuse=False, window=8)
    first, second, third = (sim.arrive([number] * 32, 16) for number in range(3))
    together = 0
    while third.computed == 0:
        sim.step()
        together += {row.sequence for row in sim.rows if row.count == 1} == {first, second}
        if first.generated > 1 and first.finish_reason is None:
            assert len(first.table.blocks) - first.table.dropped <= 3
    assert together > 8  # of 15 tokens each after their prompts
    sim.run()
    assert [len(each.tokens) for each in sim.finished] == [48, 48, 48]


def test_blocks_behind_the_window_stay_in_host_memory() -> None:
    sim = simulation(blocks=8, num_tokens=48, chunked=True, window=8, host_blocks=8)
    first = sim.arrive([1] * 32, 1)
    sim.run()
    sim.arrive([2] * 31, 1)
    sim.run()
    host = sim.scheduler.blocks.host
    assert (host.used, host.onboarded) == (8, 0)
    again = sim.arrive([1] * 32, 1)
    sim.step()
    assert (sim.rows[0].start, host.onboarded) == (28, 2)  # 8 tokens before position 28: two blocks of seven
    sim.run()
    assert sim.finished[::2] == [first, again]


def test_blocks_behind_the_window_are_shared_as_others_are() -> None:
    sim = simulation(blocks=24, num_tokens=48, chunked=True, window=8)
    first = sim.arrive(list(range(32)), 8)
    sim.step()
    assert (first.table.dropped, len(sim.scheduler.blocks.pool.order)) == (6, 6)
    second = sim.arrive([*range(32), 7], 8)
    sim.step()
    assert second.reused_blocks == 8
    assert [(row.start, row.count) for row in sim.rows if row.sequence is second] == [(32, 1)]
    assert second.table.dropped == 6
    sim.run()


def test_a_group_that_runs_in_part_is_completed_before_an_earlier_request_that_lacks_blocks() -> None:
    sim = simulation(blocks=6, policy="max_utilization", chunked=True, reuse=False)
    earlier = sim.arrive([1] * 16, 2)
    sim.scheduler.waiting.clear()  # as if its grammar were still being compiled
    other = sim.arrive([2] * 9, 3)
    members = [sim.arrive([3] * 6, 2) for _ in range(2)]
    group = Group(2, members)
    for member in members:
        member.group, member.order = group, members[0].order
    sim.step()
    assert sim.scheduler.running == [other, members[0]]
    sim.scheduler.add(earlier)
    sim.run()
    assert sim.finished == [other, *members, earlier]


def test_guaranteed_no_evict_pauses_nothing_for_a_higher_priority() -> None:
    sim = simulation(blocks=3, reuse=False)
    low = sim.arrive([1] * 4, 9, priority=0)
    sim.step()
    high = sim.arrive([2] * 4, 9, priority=1)
    sim.run()
    assert (sim.finished, sim.scheduler.pauses) == ([low, high], 0)


def test_less_than_four_percent_of_the_allocated_slots_hold_no_token() -> None:
    rng = random.Random(0)
    manager = BlockManager(2000, 16, reuse=False)
    limits = BatchLimits(max_batch_size=64, max_num_tokens=2048, max_input_len=1024, max_seq_len=1536)
    sim = Simulation(Scheduler(limits, manager, chunked_context=True))
    for _ in range(120):
        sim.arrive([rng.randrange(99) for _ in range(rng.randint(1, 600))], rng.randint(1, 400))
    allocated = held = 0
    while not sim.scheduler.idle:
        sim.step()
        for sequence in sim.scheduler.running:
            allocated += len(sequence.table.blocks) * 16
            held += sequence.computed
    assert 300 < sum(len(s.tokens) for s in sim.finished) / len(sim.finished) < 600
    assert 1 - held / allocated < 0.04
