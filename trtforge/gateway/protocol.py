"""HTTP/1.1 of uvicorn by h11, which bounds the size of headers, with a limit of time for them."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""From the start of a connection, or the first byte of a later request, until its headers are complete."""


class BoundedProtocol(H11Protocol):
    """A connection that is closed if a request's headers do not come. uvicorn itself would wait for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if not self._waiting:
            self._stop()
        elif self._timer is None:
            self._start()

    @property
    def _waiting(self) -> bool:
        """Whether the headers of a request are incomplete, or none has begun."""
        return self.cycle is None or self.cycle.response_complete

    def _start(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._waiting:
            self.transport.close()
