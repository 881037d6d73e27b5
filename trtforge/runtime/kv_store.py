"""KV blocks in files: full blocks of finished requests outlast the engine's memory and the engine itself.

A file is named by the digest that identifies a prefix (scheduling.blocks) within a directory for the engine's weights,
and holds the block of all layers, on all ranks, one after another and a digest of it. Files are written by a thread of
their own, and read when a request that starts with their tokens is admitted. Those that were used least recently are
deleted when there are too many bytes.
"""

import errno
import functools
import logging
import os
import queue
import re
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from trtforge.core.defaults import KV_CACHE_DIR_BYTES
from trtforge.core.digest import file_digest, text_digest
from trtforge.core.errors import ForgeError, first_line
from trtforge.core.manifest import files_below, read_manifest
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.trtllm import CONFIG_FILE
from trtforge.runtime.ranks.source import Source

_MOST_WAITING = 64 << 20
"""Bytes that wait to be written, or one block; blocks that come while there are more wait, or are not stored."""
_LAST_WRITES_TIMEOUT = 10.0  # seconds
_LONGEST_WAIT = 5.0  # seconds of each step in which all requests wait for room
_PAUSE = 60.0  # seconds in which nothing is stored after a write that failed
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DRAFT_AGE = 3600.0  # seconds after which an unfinished file belongs to nobody
_RUNTIME = Path(__file__).parent
_COMPUTING = ("architecture", "cuda", "decoder", "linears", "native")
_DIGEST_BYTES = 32
_STORED = re.compile(r"[0-9a-f]{32}/([0-9a-f]{32}|\.[0-9a-f]{32}\.\d+\.new)")
"""Names below the directory; files with other names are not touched."""
_TOKENIZER = f"{TOKENIZER_DIRECTORY}/"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KvStoreOptions:
    """Where blocks are stored, and at most how many bytes, those of other engines in the directory included."""

    directory: Path
    most_bytes: int = KV_CACHE_DIR_BYTES


class Cache(Protocol):
    """The KV blocks of an engine, on all its ranks: see RankGroup."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    @property
    def block_layout(self) -> str:
        """What tells blocks of this layout from others."""

    def read_block(self, block: int) -> Tensor:
        """What a block holds: uint8 (block_bytes,). Raises RuntimeError if a rank has ended."""


class KvStore:
    """The stored blocks of one engine. Its methods are called by the engine's thread; never raises once it is open."""

    def __init__(self, options: KvStoreOptions, identity: str, cache: Cache) -> None:
        """`identity`: of the weights that computed the blocks.

        Raises ForgeError if the directory cannot be written, or may hold no block.
        """
        self._root, self._asked_bytes = options.directory, options.most_bytes
        self._most_bytes = options.most_bytes  # fewer on a full disk
        self._full_by = 0  # error number of the last write for which there was no room
        self._own = text_digest(f"{identity} {cache.block_layout}")[:_DIGEST_BYTES]
        self._cache = cache
        self._block_bytes = cache.block_bytes
        self._file_bytes = self._block_bytes + _DIGEST_BYTES
        self._fills: dict[int, Tensor] = {}
        self._used = 0
        self._lock = threading.RLock()
        self._written = threading.Condition(self._lock)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of each file by its name in the directory, the least recently used first."""
        self._waiting: dict[str, bytes] = {}
        self._work: queue.SimpleQueue[str | Callable[[], None] | None] = queue.SimpleQueue()
        self._broken = False
        self._patience = _LONGEST_WAIT
        self._resumes_at = 0.0  # of `monotonic`; 0: the last write succeeded
        self._trusted: set[str] | None = None
        """Since a damaged file was found: those that were written or read whole; None before."""
        if self._file_bytes > self._asked_bytes:
            raise ForgeError(
                f"{self._root}: {self._asked_bytes:,} bytes hold no KV block, whose file has {self._file_bytes:,}",
                hint="Allow more bytes, or store no blocks.",
            )
        self._number = secrets.randbits(63)  # process ids recur: of engines in one process, and in several containers
        try:
            self._begin()
            draft = self._root / self._own / f".{self._number}.new"
            draft.write_bytes(b"")
            draft.unlink()
        except OSError as error:
            raise ForgeError(
                f"{self._root}: KV blocks cannot be stored there: {error.strerror}",
                hint="Name a directory that you may write to.",
            ) from None
        self._writer = threading.Thread(target=self._write_all, name="trtforge-kv-store", daemon=True)
        self._writer.start()

    def holds(self, key: bytes) -> bool:
        """Whether the block of `key` is stored, perhaps by another engine; `fetch` may still find it damaged."""
        name = self._name(key)
        with self._lock:
            if name in self._sizes:
                return True
        try:
            size = os.stat(f"{self._root}/{name}").st_size
        except OSError:
            return False
        if size != self._file_bytes:
            self._delete(name)
            return False
        self._note(name, size)
        return True

    def fetch(self, key: bytes, block: int) -> bool:
        """Read the block of `key`, with which `block` is filled before the next step; False if that fails."""
        name = self._name(key)
        path = self._root / name
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        whole = len(content) == self._file_bytes
        if not whole or _digest(key, content[:-_DIGEST_BYTES]) != content[-_DIGEST_BYTES:]:
            self._delete(name)
            with self._lock:
                self._trusted = set() if self._trusted is None else self._trusted
            return False
        self._fills[block] = torch.from_numpy(np.frombuffer(content, np.uint8, self._block_bytes).copy())
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
            self._trust(name)
        with suppress(OSError):
            os.utime(path)
        return True

    def forget(self, block: int) -> bool:
        """`block` gets other content: it is not filled any more. Whether it was to be."""
        return self._fills.pop(block, None) is not None

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        """Store the content of a computed block, unless it is stored already or too much waits to be written.

        Behind a damaged file others may be damaged too, which nobody has read: they are written again.
        `waits`: until enough of that is written.
        """
        if self._broken or block in self._fills:
            return
        if self._resumes_at > time.monotonic():
            return
        name = self._name(key)
        with self._lock:
            whole = name in self._sizes and (self._trusted is None or name in self._trusted)
            if whole or name in self._waiting:
                return
            if waits:
                self._wait()
            if not self._has_room():
                return
        try:
            content = self._cache.read_block(block).numpy().tobytes()
        except RuntimeError:  # a rank has ended, as the next step will tell
            self._broken = True
            return
        with self._lock:
            self._waiting[name] = content + _digest(key, content)
        self._work.put(name)

    def when_written(self, on_written: Callable[[], None]) -> None:
        """Call `on_written`, from another thread, when what `keep` took so far is written or cannot be."""
        self._work.put(on_written)

    def take_fills(self) -> Mapping[int, Tensor]:
        """Contents (bytes,) uint8 by block, as `read_block` gave them, to write before the next step."""
        fills, self._fills = self._fills, {}
        self._patience = _LONGEST_WAIT
        return fills

    def close(self) -> None:
        """Write what waits, for some seconds at most. May be called again."""
        self._work.put(None)
        self._writer.join(_LAST_WRITES_TIMEOUT)

    def _wait(self) -> None:
        """Until there is room for a block, or this has taken too long since the last step."""
        begun = time.monotonic()
        if self._written.wait_for(self._has_room, self._patience):
            self._patience = max(0.0, self._patience - (time.monotonic() - begun))
        else:
            self._pause(TimeoutError(f"writing takes longer than {_LONGEST_WAIT:g} s"))

    def _has_room(self) -> bool:
        return not self._waiting or (len(self._waiting) + 1) * self._block_bytes <= _MOST_WAITING

    def _name(self, key: bytes) -> str:
        return f"{self._own}/{key.hex()}"

    def _begin(self) -> None:
        """Make the directory and find what is stored, of other engines too, in the order of its last use."""
        (self._root / self._own).mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in self._root.glob("*/*"):
            name = f"{path.parent.name}/{path.name}"
            if _STORED.fullmatch(name) is None:
                continue
            with suppress(OSError):
                facts = path.stat()
                if path.suffix == ".new":
                    is_rest = facts.st_mtime < time.time() - _DRAFT_AGE
                else:
                    is_rest = path.parent.name == self._own and facts.st_size != self._file_bytes  # a damaged file
                    if not is_rest:
                        found.append((facts.st_mtime_ns, name, facts.st_size))
                if is_rest:
                    path.unlink()
        with self._lock:
            self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))
            self._used = sum(self._sizes.values())

    def _write_all(self) -> None:
        while (work := self._work.get()) is not None:
            if not isinstance(work, str):
                work()
                continue
            with self._lock:
                content = self._waiting[work]
            try:
                if not self._broken and self._resumes_at <= time.monotonic():
                    if self._resumes_at:
                        self._begin()
                        self._most_bytes = self._limit()
                    self._write(work, content)
                    self._resumes_at = 0.0
            except OSError as error:
                self._pause(error)
            with self._lock:
                del self._waiting[work]
                self._written.notify()

    def _pause(self, error: OSError) -> None:
        """Store nothing for a while; after that, where the disk is full, no more bytes than fit on it."""
        self._full_by = error.errno if error.errno in _FULL else 0
        self._resumes_at = time.monotonic() + _PAUSE
        _LOG.warning("%s: KV blocks are not stored for %d s: %s", self._root, _PAUSE, first_line(error))

    def _limit(self) -> int:
        """Bytes that may be stored now: on a full disk what is there, and what others have left free since.

        How much a quota leaves, nothing tells.
        """
        if not self._full_by:
            return self._asked_bytes
        free = 0 if self._full_by == errno.EDQUOT else shutil.disk_usage(self._root).free
        return min(self._asked_bytes, max(self._used + free, self._file_bytes))

    def _write(self, name: str, content: bytes) -> None:
        path = self._root / name
        self._make_room(len(content))
        draft = path.with_name(f".{path.name}.{self._number}.new")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        self._note(name, len(content))
        with self._lock:
            self._trust(name)

    def _trust(self, name: str) -> None:
        if self._trusted is not None:
            self._trusted.add(name)

    def _note(self, name: str, size: int) -> None:
        """A file has been written, by this engine or another one."""
        with self._lock:
            self._used += size - self._sizes.get(name, 0)
            self._sizes[name] = size

    def _make_room(self, wanted: int) -> None:
        if self._used + wanted > self._most_bytes and self._full_by:
            self._most_bytes = self._limit()
        while self._used + wanted > self._most_bytes:
            with self._lock:
                oldest = next(iter(self._sizes))
            self._delete(oldest)

    def _delete(self, name: str) -> None:
        with self._lock:
            self._used -= self._sizes.pop(name, 0)
            if self._trusted is not None:
                self._trusted.discard(name)
        with suppress(OSError):
            (self._root / name).unlink()


def open_store(options: KvStoreOptions | None, source: Source, cache: Cache, *, reuse: bool) -> KvStore | None:
    """The store of an engine, if one is asked for. Raises ForgeError for an engine that reuses no blocks."""
    if options is None:
        return None
    source.require_shared("a directory for KV blocks", reuse)
    return KvStore(options, f"{_weights(source)} {_arithmetic()}", cache)


def _weights(source: Source) -> str:
    """What tells the model, its weights, adapters and kernels from others; engines may differ in their limits."""
    manifest = read_manifest(source.directory)
    if manifest is not None:
        digests = {name: record.blake3 for name, record in manifest.files.items()}
    else:
        digests = {name: file_digest(source.directory / name) for name in files_below(source.directory)}
    forge = source.forge.model_dump(mode="json", exclude={"features"})
    if digests.pop(CONFIG_FILE, None) is not None:
        digests[CONFIG_FILE] = text_digest(f"{source.config.model_dump_json()} {sorted(forge.items())}")
    return str(sorted(item for item in digests.items() if not item[0].startswith(_TOKENIZER)))


@functools.cache
def _arithmetic() -> str:
    """What tells the code that computes blocks from that of other versions, which may have computed them otherwise."""
    files = sorted(path for part in _COMPUTING for path in (_RUNTIME / part).rglob("*"))
    sources = [path for path in files if path.suffix in (".py", ".cpp", ".h")]
    return text_digest("".join(f"{path.relative_to(_RUNTIME)} {file_digest(path)}\n" for path in sources))


def _digest(key: bytes, content: bytes) -> bytes:
    return blake3(key + content, max_threads=blake3.AUTO).digest()
