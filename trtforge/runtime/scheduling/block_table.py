"""The KV blocks of a sequence, and the cached prefix that a new sequence finds."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from trtforge.runtime.scheduling.retention import SequenceRetention


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one sequence in order. The first len(keys) are full and computed; `keys` are their hashes.

    `salt` is hashed before the tokens: tables with different salts share no blocks. The first `dropped` blocks are
    behind the window and were freed; their entries are 0. If sliding-window layers have separate blocks
    (`window_blocks.py`), they do not attend to the first `unseen` blocks. `retention`: None for the default.
    `stored`: full blocks go to the store as soon as they are computed.
    `lora_id`: task id of the LoRA adapter; `salt` differs between adapters.
    """

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    salt: bytes = b""
    dropped: int = 0
    unseen: int = 0
    retention: SequenceRetention | None = None
    stored: bool = False
    lora_id: int | None = None

    def empty_copy(self) -> "BlockTable":
        """The table of another sequence of the same request."""
        return BlockTable(salt=self.salt, retention=self.retention, lora_id=self.lora_id)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest cached prefix of some tokens: its blocks, None for those in host memory or in the store.

    `idle` of the blocks are held by no sequence and count as free. Each None needs another free block.
    `tokens`: all tokens that were looked up; empty without a lookup.
    """

    blocks: tuple[int | None, ...] = ()
    keys: tuple[bytes, ...] = ()
    idle: int = 0
    tokens: Sequence[int] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def held(self) -> int:
        """Number of these blocks that sequences hold."""
        return sum(block is not None for block in self.blocks) - self.idle


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a block: digest of the previous block's key and its own tokens, so equal keys mean equal prefixes."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def salt_of(adapter: int | None, cache_salt: str | None) -> bytes:
    """Bytes hashed before a request's tokens: its LoRA adapter's task id and its `cache_salt`.

    With a `cache_salt` they are a 16-byte digest, whose personalisation keeps it different from every block's key.
    """
    own = b"" if adapter is None else b"adapter %d" % adapter
    if cache_salt is None:
        return own
    return blake2b(own + b"\0" + cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()


def blocks_behind(window: int, computed: int, tokens_per_block: int) -> int:
    """Number of a sequence's blocks that are entirely behind the window of the token at position `computed`."""
    return max(0, (computed - window + 1) // tokens_per_block)
