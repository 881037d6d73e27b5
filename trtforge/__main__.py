"""The `trtforge` program and `python -m trtforge`: an interruption at any moment ends it with exit status 130.

Imports nothing of trtforge until the signal is handled.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_STATUS = 128 + signal.SIGINT
_CLEAN_LINE = b"\x1b[?25h\r\x1b[K"
"""Shows the cursor, which a progress bar hides, and erases the bar's line."""


def main() -> None:
    """Run the program. While it loads and while it ends, SIGINT ends the process; in between, commands handle it."""
    _open_closed_streams()
    interruptible = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    try:
        from trtforge.cli.app import main as run
        from trtforge.machine.interruptions import AfterImports

        if interruptible:
            interruption = AfterImports(_interrupt)

            def handle(number: int, frame: FrameType | None) -> None:
                if interruption.waits:
                    _end_at_once(_said())
                interruption.act(frame)

            signal.signal(signal.SIGINT, handle)
        run()
    except SystemExit:
        raise
    except BaseException as error:
        if not _is_interruption(error):
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(_STATUS)
    finally:
        if interruptible:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            signal.signal(signal.SIGINT, _leave)


def _open_closed_streams() -> None:
    """Open closed standard streams as /dev/null, as files opened later would otherwise get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _is_interruption(error: BaseException) -> bool:
    """Whether `error` is a KeyboardInterrupt or was raised because of one or while handling one."""
    seen, left = set[int](), [error]
    while left:
        one = left.pop()
        if isinstance(one, KeyboardInterrupt):
            return True
        if id(one) not in seen:
            seen.add(id(one))
            left += [other for other in (one.__cause__, one.__context__) if other is not None]
    return False


def _said() -> str:
    """The program's message after an interruption."""
    with suppress(Exception):
        return str(sys.modules["trtforge.cli.app"].interruption("SIGINT"))
    return "interrupted"


def _leave(number: int, frame: FrameType | None) -> None:
    _end_at_once("interrupted")


def _end_at_once(said: str) -> NoReturn:
    """Print `said` as the last line and end the process."""
    with suppress(OSError):  # the reader may be gone
        stderr = _taken_from_other_threads()
        if os.isatty(stderr) and os.environ.get("TERM") not in ("dumb", "unknown"):
            os.write(stderr, _CLEAN_LINE)
        os.write(stderr, f"{said}\n".encode(errors="backslashreplace"))
    os._exit(_STATUS)


def _taken_from_other_threads() -> int:
    """A descriptor of standard error for the caller only; further output of a progress bar's thread is discarded."""
    try:
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # no descriptors are left
        return 2
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return stderr


if __name__ == "__main__":
    main()
