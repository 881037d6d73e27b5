"""Events of a running server, and their lines in the foreground: addresses on stdout, the rest on stderr."""

import sys
from collections.abc import Sequence
from typing import Protocol

from trtforge.serve.restart import ServerFailed


class Announcements(Protocol):
    """Receives the events of a server. Each method may be called again after a restart."""

    def starting(self) -> None:
        """Its processes are about to start."""

    def ready(self, http: str, grpc: str, metrics: str) -> None:
        """The server has generated its first token. Addresses are HOST:PORT."""

    def openai(self, url: str) -> None:
        """OpenAI's API is served too. May be called in a different thread from the other methods."""

    def complete(self, commands: Sequence[str]) -> None:
        """All addresses are served; `commands` to try the server. Called in the thread of `openai`."""

    def restarting(self, failure: ServerFailed) -> None:
        """The server failed and will be restarted after a pause."""

    def draining(self) -> None:
        """A stop was requested: running requests may finish."""

    def stopped(self, line: str) -> None:
        """The server has ended as requested; `line` reports the outcome of its requests."""


class Printed:
    """The announcements of a server in the foreground."""

    def starting(self) -> None:
        """Print nothing: the user has just started it."""

    def ready(self, http: str, grpc: str, metrics: str) -> None:
        """Print the line that scripts wait for."""
        print(ready_line(http, grpc, metrics), flush=True)

    def openai(self, url: str) -> None:
        """Print the line of OpenAI's API."""
        print(openai_line(url), flush=True)

    def complete(self, commands: Sequence[str]) -> None:
        """Print the commands, one per line."""
        print("\n".join(("try:", *commands)), file=sys.stderr, flush=True)

    def restarting(self, failure: ServerFailed) -> None:
        """Print nothing: `run_with_restarts` prints a line."""

    def draining(self) -> None:
        """Print nothing: the last line reports the result."""

    def stopped(self, line: str) -> None:
        """Print the last line."""
        print(line, file=sys.stderr, flush=True)


def ready_line(http: str, grpc: str, metrics: str) -> str:
    """The line with the addresses of a server."""
    return f"ready http={http} grpc={grpc} metrics={metrics}"


def openai_line(url: str) -> str:
    """The line with the address of OpenAI's API."""
    return f"openai={url}"
