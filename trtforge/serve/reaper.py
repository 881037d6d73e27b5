"""Keeps the reaper process alive and sends it the list of things to clean up if this process is killed."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import trtforge
from trtforge.machine.processes import stat_of
from trtforge.serve.reap import Remains


class Reaper:
    """A reaper process; a context manager that ends it."""

    def __init__(self) -> None:
        self._remains = Remains()
        self._start()

    def __enter__(self) -> "Reaper":
        return self

    def __exit__(self, *error: object) -> None:
        self.tell(Remains())
        self._end()

    @property
    def pid(self) -> int:
        """Process id of the current reaper."""
        return self._process.pid

    def tell(self, remains: Remains) -> None:
        """Replace the reaper's list."""
        self._remains = remains
        with suppress(OSError):  # the reaper was killed: `keep` starts another
            os.write(self._pipe, remains.encode())

    def keep(self) -> None:
        """Start another reaper if this one was killed or stopped."""
        stat = stat_of(self._process.pid)
        if stat is None or stat.ended or stat.state == "T":
            self._process.kill()
            self._end()
            self._start()

    def _end(self) -> None:
        os.close(self._pipe)
        self._process.wait()

    def _start(self) -> None:
        """Start a reaper in its own session, so that neither Ctrl-C nor the end of the server's session reaches it.

        Its list is in its pipe before it runs. Its working directory is `/`, so that no local file shadows a module.
        """
        read, self._pipe = os.pipe()
        os.write(self._pipe, self._remains.encode())
        with open(read, "rb") as stdin:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trtforge.serve.reap"],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=os.environ | {"PYTHONPATH": str(Path(trtforge.__file__).parent.parent)},
            )
