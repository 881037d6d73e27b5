"""Creates the parts of an engine: ranks, drafter, observers, KV block files and scheduler."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from trtforge.formats.attention_windows import partial_window, widest_window
from trtforge.runtime.drafters import open_drafter, with_drafter
from trtforge.runtime.drafting import Drafter
from trtforge.runtime.kv_store import KvStore, open_store
from trtforge.runtime.observers import Observers
from trtforge.runtime.options import EngineOptions
from trtforge.runtime.ranks.engine_adapters import taking_adapters
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.source import Source, open_engine
from trtforge.runtime.scheduling.blocks import BlockManager
from trtforge.runtime.scheduling.event_recorder import BlockObserver
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.window_blocks import WindowBlocks

Parts = tuple[Source, RankGroup, EngineOptions, Drafter | None, Observers, KvStore | None]
"""The arguments of `Engine`, in this order."""


def open_parts(directory: Path, options: EngineOptions | None, opened: ExitStack) -> Parts:
    """Open the parts of a torch-backend engine on all its ranks; `opened` closes them.

    Without options, its own features apply. Raises ForgeError.
    """
    source = taking_adapters(open_engine(directory))
    features = source.forge.features
    options = options or EngineOptions(kv_reuse=features.kv_reuse, chunked_context=features.chunked_context)
    if options.speculation is None:
        options = replace(options, speculation=features.of_torch)
    source = with_drafter(source, options.speculation)
    if options.kv_cache_host_memory_bytes:
        source.require_shared("kv_cache_host_memory_bytes", options.kv_reuse)
    observers = Observers.of(source, options)  # first: a wrong path must fail before the long load
    opened.callback(observers.close)
    ranks = RankGroup(source, threads=options.threads, memory=options.kv_memory)
    opened.callback(ranks.close)
    drafter = open_drafter(options.speculation, source, ranks)
    if drafter is not None:
        opened.callback(drafter.close)
    store = open_store(options.kv_store, source, ranks, reuse=options.kv_reuse)
    return source, ranks, options, drafter, observers, store


def new_scheduler(
    source: Source,
    ranks: RankGroup,
    options: EngineOptions,
    store: KvStore | None,
    most_adapters: int,
    observer: BlockObserver | None,
) -> Scheduler:
    """The scheduler of an engine. `most_adapters`: maximum number of different adapters that run at once."""
    padded = options.batching == "static_padded"  # a finished row computes its last token again: one token further back
    partial, widest = (
        None if window is None else window + padded
        for window in (partial_window(source.config), widest_window(source.config))
    )
    windows = WindowBlocks.of(ranks.num_window_blocks, partial, source.tokens_per_block, ranks.num_blocks)
    blocks = BlockManager(
        ranks.num_blocks,
        source.tokens_per_block,
        reuse=source.shares(options.kv_reuse),
        store=store,
        window=widest if options.chunked_context else None,
        host_blocks=ranks.num_host_blocks,
        windows=windows,
        observer=observer,
    )
    limits = source.limits
    return Scheduler(
        replace(
            limits,
            max_batch_size=min(limits.max_batch_size, options.max_batch_size or limits.max_batch_size),
            max_num_tokens=min(limits.max_num_tokens, options.max_num_tokens or limits.max_num_tokens),
        ),
        blocks,
        policy=options.scheduler,
        chunked_context=options.chunked_context,
        batching=options.batching,
        most_adapters=most_adapters,
    )
