"""The interface between the block manager and a store of KV blocks outside the pool, such as `runtime.kv_store`."""

from typing import Protocol


class BlockStore(Protocol):
    """Contents of full blocks outside the pool, by their keys."""

    def holds(self, key: bytes) -> bool:
        """Whether the block of `key` is stored."""

    def fetch(self, key: bytes, block: int) -> bool:
        """Fill `block` with the stored content before the next step; False if it cannot be read."""

    def forget(self, block: int) -> bool:
        """Cancel filling `block`, which gets other content; returns whether a fill was pending."""

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        """Store the content of `block`, which may be overwritten afterwards.

        `waits`: wait until there is room for it, instead of leaving it out.
        """
