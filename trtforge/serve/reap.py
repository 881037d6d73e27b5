"""The reaper, `python -m trtforge.serve.reap`: ends a server and removes its files if `trtforge serve` is killed.

Its standard input is a pipe from `trtforge serve`, which writes one JSON object per line. The last one lists what
to clean up when the pipe closes. Imports are kept small: this process lives as long as the server.
"""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtforge.machine.processes import end_session
from trtforge.serve.processes import remove_traces


@dataclass(frozen=True)
class Remains:
    """Things to clean up: sessions to end (by their leaders' process ids), runtime directories, commands to run."""

    sessions: tuple[int, ...] = ()
    directories: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()

    def encode(self) -> bytes:
        """One line of JSON."""
        return json.dumps(vars(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "Remains":
        """The inverse of `encode`."""
        values = json.loads(line)
        return cls(
            tuple(values["sessions"]), tuple(values["directories"]), tuple(tuple(words) for words in values["commands"])
        )

    def remove(self) -> None:
        """End and remove everything."""
        for session in self.sessions:
            end_session(session)
        self.run_commands()
        for directory in self.directories:
            remove_traces(Path(directory))

    def run_commands(self) -> None:
        """Run the commands, ignoring failures: the program may be missing, or its work already done."""
        for command in self.commands:
            with suppress(OSError):
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def main() -> None:
    """Read until the pipe closes, then clean up according to the last complete line."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    remains = Remains()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):
            remains = Remains.decode(line)
    remains.remove()


if __name__ == "__main__":
    main()
