"""Requests that fit a KV cache if layers with sliding windows keep only the blocks within their window.

The embedded engine frees a block of all layers at once, behind the widest window; if some layers have no window, the
layers with windows get separate blocks. TensorRT-LLM frees blocks per layer; how it divides the memory among windows
differs between releases (`formats/attention_windows.py`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from trtforge.formats.attention_windows import Pools, window_blocks_for
from trtforge.plan.kv import blocks_of

SPARE_BLOCKS = 1
"""Blocks of a sequence beyond its window: the oldest is freed only when all of its tokens are behind the window
(`kSWAExtraBlock` in batch_manager/kvCacheManager.h)."""


@dataclass(frozen=True)
class CacheWindows:
    """The windows of a model's layers, in tokens: `max_seq_len` for a layer without one. `stages`: number of pipeline
    stages."""

    layers: tuple[int, ...]
    pools: Pools
    max_seq_len: int
    stages: int = 1

    def requests(self, tokens: int, length: int, tokens_per_block: int) -> int:
        """Requests of `length` tokens that fit a cache with the bytes of `tokens` tokens in all layers."""
        return min(
            int(tokens * share / tokens_per_block) // self._blocks(window, length, tokens_per_block)
            for window, share in self._shares()
        )

    def tokens_for(self, requests: int, length: int, tokens_per_block: int) -> int:
        """The smallest cache, counted as in `requests`, that `requests` requests of `length` tokens fit."""
        blocks = max(
            requests * self._blocks(window, length, tokens_per_block) / share for window, share in self._shares()
        )
        return ceil(blocks) * tokens_per_block

    def own_blocks(self, tokens_per_block: int, max_batch_size: int, max_num_tokens: int) -> int:
        """Separate blocks of the embedded engine for layers with windows; 0 if they share the blocks of the other
        layers."""
        if self.pools != "full_batch":
            return 0
        widest = max(window for window in self.layers if window < self.max_seq_len)
        return window_blocks_for(widest, tokens_per_block, max_batch_size, max_num_tokens)

    def own_layers(self, stage: int) -> int:
        """Layers of a stage that have separate blocks."""
        own = self.pools == "full_batch"
        return sum(own and window < self.max_seq_len for window in self._of_stage(stage))

    def longest(self, tokens: int, tokens_per_block: int) -> int:
        """Tokens of the longest sequence that fits a cache of `tokens`, at most `max_seq_len`."""
        found = self.max_seq_len
        for window, share in self._shares():
            blocks = int(tokens * share / tokens_per_block)
            if blocks < self._blocks(window, self.max_seq_len, tokens_per_block):
                found = min(found, blocks * tokens_per_block, max(window, 1))
        return found

    def _blocks(self, window: int, length: int, tokens_per_block: int) -> int:
        """Blocks that a sequence of `length` tokens keeps in a layer with this window."""
        kept = blocks_of(min(length, window), tokens_per_block)
        return kept + SPARE_BLOCKS if length > window else kept

    def as_json(self) -> dict[str, Any]:
        """`layers`: the number of layers with each window."""
        counted = sorted(Counter(self.layers).items())
        return {"pools": self.pools, "layers": {str(window): count for window, count in counted}}

    def _of_stage(self, stage: int) -> tuple[int, ...]:
        size = len(self.layers) // self.stages
        return self.layers[stage * size : (stage + 1) * size]

    def _shares(self) -> Iterator[tuple[int, Fraction]]:
        """Windows of each stage, with the tokens of a window's pool per token of a cache in which layers keep all
        tokens."""
        size = len(self.layers) // self.stages
        for stage in range(self.stages):
            counted = Counter(self._of_stage(stage))
            if self.pools == "one":
                yield max(counted), Fraction(1)
                continue
            if self.pools == "full_batch":  # no request waits for blocks of layers with windows
                yield self.max_seq_len, Fraction(1)
                continue
            weight = sum(window * count for window, count in counted.items())
            for window, count in counted.items():
                weighted = self.pools == "weighted"
                share = Fraction(window * count, weight) if weighted else Fraction(1, len(counted))
                yield window, share * size / count
