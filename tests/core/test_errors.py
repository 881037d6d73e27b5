import pickle
from pathlib import Path

from trtforge.core.errors import LoggedError


def test_an_error_with_a_log_crosses_processes_whole() -> None:
    error = pickle.loads(pickle.dumps(LoggedError("it ended", hint="look", log=Path("/log"))))
    assert isinstance(error, LoggedError)
    assert (error.message, error.hint, error.log) == ("it ended", "look", Path("/log"))
