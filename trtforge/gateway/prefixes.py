"""Tracks which server got a prompt's beginning before, as its KV blocks are probably still cached there."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from trtforge.gateway.request import TextRequest

_CHARACTERS = 256
_TOKENS = 64
_MOST_PARTS = 512
"""Parts of a prompt; longer prompts are compared by their first 131,072 characters."""
_MOST_KEPT = 1 << 14
"""Parts stored per server: about 3 MB."""


def parts_of(request: TextRequest) -> list[bytes]:
    """A digest for each complete part of the prompt or conversation, including all parts before.

    Equal digests mean equal beginnings of requests that may share KV blocks. A part has about 64 tokens.
    """
    content = request.prompt if request.prompt is not None else request.messages or ""
    size = _CHARACTERS if isinstance(content, str) else _TOKENS
    key = repr((request.model, request.adapter, request.sampling.cache_salt)).encode()
    found = []
    for end in range(size, min(len(content), _MOST_PARTS * size) + 1, size):
        part = content[end - size : end]
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else repr(part).encode()
        key = blake2b(key + data, digest_size=16).digest()
        found.append(key)
    return found


class Prefixes:
    """The parts of prompts that each server got, the latest ones."""

    def __init__(self, servers: int, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._parts = [OrderedDict[bytes, None]() for _ in range(servers)]

    def known(self, server: int, parts: Sequence[bytes]) -> int:
        """The number of leading parts that the server got before."""
        own = self._parts[server]
        return next((index for index, part in enumerate(parts) if part not in own), len(parts))

    def note(self, server: int, parts: Sequence[bytes]) -> None:
        """Record that the server gets these parts; beginnings are forgotten last."""
        own = self._parts[server]
        for part in reversed(parts):
            own[part] = None
            own.move_to_end(part)
        while len(own) > self._most:
            own.popitem(last=False)

    def forget(self, server: int) -> None:
        """Forget all parts of a server that has lost its KV cache."""
        self._parts[server].clear()
