"""The `trtforge` program and `python -m trtforge`: an interruption at any moment is one line and exit status 130.

Imports nothing of trtforge until the signal is handled.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

_STATUS = 128 + signal.SIGINT
_IMPORTLIB = "<frozen importlib._bootstrap>"


class _Interruption:
    """Handles SIGINT like Python, except while a module loads: many turn a KeyboardInterrupt into another error."""

    def __init__(self) -> None:
        self.came = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or end the process if a module loads; what a stage has finished is kept."""
        self.came = True
        if _is_loading(frame):
            _leave(number, frame)
        raise KeyboardInterrupt


def main() -> None:
    """Run the program. While it loads and while it ends, SIGINT ends the process; in between, commands handle it."""
    interruption = _Interruption()
    interruptible = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    try:
        from trtforge.cli.app import main as run

        if interruptible:
            signal.signal(signal.SIGINT, interruption.handle)
        run()
    except SystemExit:
        raise
    except BaseException:
        if not interruption.came:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(_STATUS)
    finally:
        if interruptible:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            signal.signal(signal.SIGINT, _leave)


def _is_loading(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_STATUS)


if __name__ == "__main__":
    main()
