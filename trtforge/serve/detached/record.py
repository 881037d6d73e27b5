"""The record of a server in the background: small, without secrets, replaced as a whole."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.core.errors import AbsentFile
from trtforge.core.json_text import read_json_object
from trtforge.core.replace import replace_text
from trtforge.machine.processes import ProcessIdentity

_FILE = "record.json"

State = Literal["starting", "ready", "draining", "restarting", "stopped", "failed"]


class Record(Config):
    """The state of a server. The starting command writes the first record, then the server's process updates it.

    `host` and `ports`: where it listens; the addresses are for clients on this machine. `commands`: to try the server;
    set once all addresses are served. `pid`, `started`, `boot`: see ProcessIdentity; `machine`: its host name, for
    display. `begun` and `since` (of the state) are seconds since 1970. `reason` and `hint`: of the last failure;
    `reason` also of a stop.
    """

    repository: str
    host: str
    ports: dict[str, int]
    http: str
    grpc: str
    metrics: str
    openai: str | None = None
    commands: tuple[str, ...] = ()
    drain_timeout: float
    machine: str
    pid: int = Field(ge=2)
    started: int
    boot: str
    begun: float
    since: float
    state: State = "starting"
    restarts: int = 0
    reason: str = ""
    hint: str = ""
    exit_status: int | None = None

    @property
    def process(self) -> ProcessIdentity:
        """The server's process."""
        return ProcessIdentity(self.pid, self.started, self.boot)


def read_record(directory: Path, name: str) -> Record | None:
    """The record in a server's directory; None if there is none. Raises ForgeError for a damaged record."""
    try:
        values = read_json_object(directory / _FILE, hint=f"End the server, and delete {directory}.")
    except AbsentFile:
        return None
    return Record.parse(values, f"the record of {name}")


def write_record(directory: Path, record: Record) -> None:
    """Replace the record in a server's directory. Raises OSError."""
    replace_text(directory / _FILE, json.dumps(record.model_dump(mode="json"), indent=2) + "\n")
