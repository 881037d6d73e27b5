"""The sliding windows in config.json of a checkpoint or engine, and their form for TensorRT-LLM's executor."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, cast

from trtforge.formats.checkpoint_keys import integer, numbers
from trtforge.formats.releases import Release, read_release_data
from trtforge.formats.trtllm import CheckpointConfig

Pools = Literal["one", "weighted", "equal", "full_batch"]
"""How the KV cache's memory is divided among layers with different windows: see `release_data/kv-windows.json`.

`full_batch`, of the embedded engine: layers with windows get the blocks of a full batch, the others get the rest.
"""


def attention_window(config: CheckpointConfig, layer: int) -> int | None:
    """Tokens that layer `layer` of the whole model attends to, the current one included; None: all.

    `sliding_window_layers` lists the layers with a window; without it, all layers except each
    `_sliding_window_pattern`-th have a window (Gemma 3), or all layers.
    """
    return next(_windows(config, range(layer, layer + 1)))


def attention_windows(config: CheckpointConfig) -> tuple[int | None, ...]:
    """The window of every layer."""
    return tuple(_windows(config, range(config.num_hidden_layers)))


def _windows(config: CheckpointConfig, layers: range) -> Iterator[int | None]:
    window = integer(config, "sliding_window") or None
    chosen = numbers(config, "sliding_window_layers")
    pattern = integer(config, "_sliding_window_pattern")
    for layer in layers:
        slides = layer in chosen if chosen is not None else not pattern or (layer + 1) % pattern != 0
        yield window if slides else None


def widest_window(config: CheckpointConfig) -> int | None:
    """The largest window if all layers have one. The embedded engine keeps so many tokens, as its blocks span all
    layers."""
    windows = attention_windows(config)
    return max((window for window in windows if window), default=None) if all(windows) else None


def partial_window(config: CheckpointConfig) -> int | None:
    """The largest window, if only some layers have one.

    The embedded engine then gives the layers with windows separate blocks.
    """
    windows = attention_windows(config)
    return None if all(windows) else max((window for window in windows if window), default=None)


def window_blocks_for(window: int, tokens_per_block: int, requests: int, step_tokens: int) -> int:
    """The number of window blocks with which no sequence ever waits for one, for `requests` sequences and
    `step_tokens`.

    Each sequence has the blocks of its window, one more if the window begins within a block, one more until its last
    block is full, and one more that the step begins; the step's tokens, drafts included, fill the others.
    """
    return requests * (-(-window // tokens_per_block) + 3) + -(-step_tokens // tokens_per_block)


def fitting_blocks(room: int, block: int, windowed: int, window_blocks: int) -> int:
    """How many KV blocks of `block` bytes fit into `room` bytes; `windowed` of a block's bytes are of windowed layers.

    Layers with windows have at most `window_blocks` blocks, the others may have more; 0: all layers have the same
    number.
    """
    fitting = max(0, room) // max(1, block)
    if 0 < window_blocks < fitting:
        fitting = (room - window_blocks * windowed) // max(1, block - windowed)
    return fitting


def executor_windows(windows: Sequence[int | None], max_seq_len: int) -> tuple[int, ...]:
    """The windows as values of `max_attention_window_size`: one per layer, one for all, or none.

    TensorRT engines do not contain them: the executor takes them when it loads the engine, and without them every
    layer attends to all tokens. A layer without a window gets `max_seq_len`.
    Source: docs/model_config.md of tensorrtllm_backend, `max_attention_window_size`; examples/gemma/README.md.
    """
    sizes = tuple(min(window or max_seq_len, max_seq_len) for window in windows)
    if all(size == max_seq_len for size in sizes):
        return ()
    return sizes[:1] if len(set(sizes)) == 1 else sizes


@cache
def pools_of(release: Release) -> Pools:
    """How a release divides the KV cache's memory among layers with different windows."""
    entries = read_release_data("kv-windows")["pools"]
    return cast(Pools, next(entry["pools"] for entry in entries if release.within(entry["since"], entry["until"])))
