"""The terminal's echo while an answer is written: off, and always on again."""

import io
import os
import pty
import termios
from collections.abc import Iterator

import pytest

from trtforge.cli.keys import Keys


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Descriptors of the side that types and of the side of the program."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def echoes(descriptor: int) -> bool:
    return bool(termios.tcgetattr(descriptor)[3] & termios.ECHO)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_the_echo_comes_back_however_the_answer_ends(terminal: tuple[int, int], error: type[BaseException]) -> None:
    _, theirs = terminal
    found = termios.tcgetattr(theirs)

    def answer() -> None:
        with Keys(theirs).silent():
            assert not echoes(theirs)
            raise error

    with pytest.raises(error):
        answer()
    assert termios.tcgetattr(theirs) == found


def test_what_is_typed_meanwhile_is_read_afterwards_and_not_echoed(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    with Keys(theirs).silent():
        os.write(ours, b"hidden\n")
        assert os.read(theirs, 100) == b"hidden\n"
        os.write(theirs, b"answer")
    assert os.read(ours, 100) == b"answer"
    os.write(ours, b"shown\n")
    assert os.read(ours, 100) == b"shown\r\n"


def test_an_interrupted_restoration_is_made_up_for_at_the_end(terminal: tuple[int, int]) -> None:
    """What is restored is what was found at the start, not what an interruption left."""
    _, theirs = terminal
    keys = Keys(theirs)
    keys.silent().__enter__()
    with keys.silent():
        pass
    assert echoes(theirs)


def test_a_stream_that_is_no_terminal_has_no_keys(terminal: tuple[int, int]) -> None:
    assert Keys.of(io.StringIO()) is None
    with open(terminal[1], closefd=False) as stream:
        assert Keys.of(stream) is not None
