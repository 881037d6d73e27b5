"""What a server announces while it runs, and its lines in the foreground: addresses on stdout, the rest on stderr."""

import sys
from collections.abc import Sequence
from typing import Protocol

from trtforge.serve.restart import ServerFailed


class Announcements(Protocol):
    """What happens to a server. Each method may be called again after a restart."""

    def starting(self) -> None:
        """Its processes are about to start."""

    def ready(self, http: str, grpc: str, metrics: str) -> None:
        """A token was generated. Addresses as HOST:PORT."""

    def openai(self, url: str) -> None:
        """OpenAI's API is served as well. May be called in another thread than the others."""

    def complete(self, commands: Sequence[str]) -> None:
        """Every address that it will have is served; commands to try it. The thread is that of `openai`."""

    def restarting(self, failure: ServerFailed) -> None:
        """It failed, and will be started again after a pause."""

    def draining(self) -> None:
        """A stop was requested: running requests may finish."""

    def stopped(self, line: str) -> None:
        """It has ended as requested; `line` says what became of the requests."""


class Printed:
    """The announcements of a server in the foreground."""

    def starting(self) -> None:
        """Nothing: whoever started it knows."""

    def ready(self, http: str, grpc: str, metrics: str) -> None:
        """The line that scripts wait for."""
        print(ready_line(http, grpc, metrics), flush=True)

    def openai(self, url: str) -> None:
        """The line after it."""
        print(openai_line(url), flush=True)

    def complete(self, commands: Sequence[str]) -> None:
        """The commands, one a line."""
        print("\n".join(("try:", *commands)), file=sys.stderr, flush=True)

    def restarting(self, failure: ServerFailed) -> None:
        """Nothing: a line with the pause is printed."""

    def draining(self) -> None:
        """Nothing: the last line counts."""

    def stopped(self, line: str) -> None:
        """The last line."""
        print(line, file=sys.stderr, flush=True)


def ready_line(http: str, grpc: str, metrics: str) -> str:
    """Where a server listens."""
    return f"ready http={http} grpc={grpc} metrics={metrics}"


def openai_line(url: str) -> str:
    """Where OpenAI's API is served."""
    return f"openai={url}"
