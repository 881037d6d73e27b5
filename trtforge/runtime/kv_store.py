"""KV blocks in files: full blocks of finished requests outlast the engine's memory and the engine itself.

A file is named by the digest of a prefix (scheduling.blocks), in a directory for the engine's weights. It contains the
block for all layers and ranks, one after another, then a digest of it. A separate thread writes files; they are read
when a request that starts with their tokens is admitted. The least recently used ones are deleted when the files exceed
the byte limit.
"""

import errno
import functools
import logging
import os
import queue
import re
import secrets
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
from trtforge.runtime.architecture.rotary import inverse_frequencies
from trtforge.runtime.ranks.source import Source

_MOST_WAITING = 64 << 20
"""Maximum bytes waiting to be written, but at least one block. Further blocks wait or are not stored."""
_LAST_WRITES_TIMEOUT = 10.0  # seconds
_LONGEST_WAIT = 5.0  # seconds per step that all requests may wait for room
_PAUSE = 60.0  # seconds without storing after a failed write
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DRAFT_AGE = 3600.0  # seconds after which an unfinished file is abandoned
_RUNTIME = Path(__file__).parent
_COMPUTING = ("adapters", "architecture", "cuda", "decoder", "linears", "native")
_DIGEST_BYTES = 32
_STORED = re.compile(r"[0-9a-f]{32}/([0-9a-f]{32}|\.[0-9a-f]{32}\.\d+\.new)")
"""Names of files below the directory; other files are left alone."""
_TOKENIZER = f"{TOKENIZER_DIRECTORY}/"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class KvStoreOptions:
    """Where blocks are stored, and the maximum bytes in the directory, files of other engines included."""

    directory: Path
    most_bytes: int = KV_CACHE_DIR_BYTES


class Cache(Protocol):
    """The KV blocks of an engine, on all its ranks: see RankGroup."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    @property
    def block_layout(self) -> str:
        """Identifies the layout of a block."""

    def read_block(self, block: int) -> Tensor:
        """A block's content, uint8 (block_bytes,). Raises RuntimeError if a rank has ended."""


class KvStore:
    """The stored blocks of one engine. The engine's thread calls its methods, which raise nothing once it is open."""

    def __init__(self, options: KvStoreOptions, identity: str, cache: Cache) -> None:
        """`identity`: of the weights and code that compute the blocks.

        Raises ForgeError if the directory cannot be written, or the limit is smaller than a block.
        """
        self._root, self._asked_bytes = options.directory.absolute(), options.most_bytes
        self._most_bytes = options.most_bytes  # lower on a full disk
        self._full_by = 0  # errno of the last write, if the disk was full
        self._own = text_digest(f"{identity} {cache.block_layout}")[:_DIGEST_BYTES]
        self._cache = cache
        self._block_bytes = cache.block_bytes
        self._file_bytes = self._block_bytes + _DIGEST_BYTES
        self._fills: dict[int, Tensor] = {}
        self._used = 0
        self._lock = threading.RLock()
        self._written = threading.Condition(self._lock)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of each file by name, the least recently used first."""
        self._waiting: dict[str, bytes] = {}
        self._work: queue.SimpleQueue[str | Callable[[], None] | None] = queue.SimpleQueue()
        self._broken = False
        self._patience = _LONGEST_WAIT
        self._resumes_at = 0.0  # by `monotonic`; 0: the last write succeeded
        self._trusted: set[str] | None = None
        """Files written or read undamaged since a damaged one was found; None before."""
        if self._file_bytes > self._asked_bytes:
            raise ForgeError(
                f"{self._root}: {self._asked_bytes:,} bytes are less than one KV block's file of {self._file_bytes:,}",
                hint="Allow more bytes, or store no blocks.",
            )
        self._number = secrets.randbits(63)  # process ids are not unique: several engines or containers
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
        """Read the block of `key` and fill `block` with it before the next step; False if that fails."""
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
        """Cancel filling `block`, which gets other content; returns whether a fill was pending."""
        return self._fills.pop(block, None) is not None

    def keep(self, key: bytes, block: int, *, waits: bool = False) -> None:
        """Store the content of a computed block, unless it is stored already or too much waits to be written.

        After a damaged file was found, files that were not read since may be damaged too, and are written again.
        `waits`: wait for room instead of leaving the block out.
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
        except RuntimeError:  # a rank has ended; the next step raises the error
            self._broken = True
            return
        with self._lock:
            self._waiting[name] = content + _digest(key, content)
        self._work.put(name)

    def when_written(self, on_written: Callable[[], None]) -> None:
        """Call `on_written`, from another thread, when all blocks kept so far are written or cannot be."""
        self._work.put(on_written)

    def take_fills(self) -> Mapping[int, Tensor]:
        """Contents by block, uint8 (bytes,) as from `read_block`, to write before the next step."""
        fills, self._fills = self._fills, {}
        self._patience = _LONGEST_WAIT
        return fills

    def close(self) -> None:
        """Write the waiting blocks, for some seconds at most. May be called again."""
        self._work.put(None)
        self._writer.join(_LAST_WRITES_TIMEOUT)

    def _wait(self) -> None:
        """Wait until there is room for a block, or until waiting has taken too long since the last step."""
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
        """Create the directory and list the stored files, of other engines too, in the order of their last use."""
        for directory in (self._root, self._root / self._own):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        self._make_room(0)  # the limit may be lower than that of the engine that wrote the files
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
        """Store nothing for a while; after that, if the disk was full, no more bytes than fit on it."""
        self._full_by = error.errno if error.errno in _FULL else 0
        self._resumes_at = time.monotonic() + _PAUSE
        _LOG.warning("%s: KV blocks are not stored for %d s: %s", self._root, _PAUSE, first_line(error))

    def _limit(self) -> int:
        """Maximum bytes to store now; on a full disk, the stored ones plus what is free by now.

        Nothing is free if the file system can have no more files. There is no way to ask how much a quota leaves.
        """
        if not self._full_by:
            return self._asked_bytes
        facts = os.statvfs(self._root)
        no_files_left = facts.f_files > 0 and facts.f_favail == 0
        free = 0 if self._full_by == errno.EDQUOT or no_files_left else facts.f_bavail * facts.f_frsize
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
        """Record a file that this engine or another one has written."""
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
    """The store of an engine; None without options. Raises ForgeError for an engine that does not reuse blocks."""
    if options is None:
        return None
    source.require_shared("a directory for KV blocks", reuse)
    return KvStore(options, f"{_weights(source)} {_rotation(source)} {_arithmetic()}", cache)


def _weights(source: Source) -> str:
    """Identifies the model, its weights, adapters and kernels. Engines with different limits may share blocks, unless
    the rotation of their keys differs."""
    manifest = read_manifest(source.directory)
    if manifest is not None:
        digests = {name: record.blake3 for name, record in manifest.files.items()}
    else:
        digests = {name: file_digest(source.directory / name) for name in files_below(source.directory)}
    forge = source.forge.model_dump(mode="json", exclude={"features"})
    if digests.pop(CONFIG_FILE, None) is not None:
        digests[CONFIG_FILE] = text_digest(f"{source.config.model_dump_json()} {sorted(forge.items())}")
    return str(sorted(item for item in digests.items() if not item[0].startswith(_TOKENIZER)))


def _rotation(source: Source) -> str:
    """Identifies the rotations of keys: dynamic scaling and longrope depend on the engine's maximum length."""
    rotaries = source.spec(0).rotaries
    found = [inverse_frequencies(spec, source.limits.max_seq_len) for spec in rotaries]
    return text_digest(str([(frequencies.tolist(), factor) for frequencies, factor in found]))


@functools.cache
def _arithmetic() -> str:
    """Identifies the code that computes blocks: other versions may compute different values."""
    files = sorted(path for part in _COMPUTING for path in (_RUNTIME / part).rglob("*"))
    sources = [path for path in files if path.suffix in (".py", ".cpp", ".h")]
    return text_digest("".join(f"{path.relative_to(_RUNTIME)} {file_digest(path)}\n" for path in sources))


def _digest(key: bytes, content: bytes) -> bytes:
    return blake3(key + content, max_threads=blake3.AUTO).digest()
