"""The status of servers in the background: that of their records, unless their process is gone."""

import platform
from dataclasses import dataclass
from pathlib import Path

from trtforge.machine.processes import boot_of_machine
from trtforge.serve.detached.record import Record
from trtforge.serve.detached.registry import Found

_OVER = ("stopped", "failed")


@dataclass(frozen=True)
class Status:
    """The status of a server. `state`: its record's, or `unknown` without a usable record.

    `since`: start of the state in seconds since 1970; None if unknown. `reason`, `hint`: of a failure or a stop.
    `elsewhere`: the machine on which it runs, empty for this one.
    """

    name: str
    log: Path
    alive: bool
    state: str
    since: float | None
    reason: str
    hint: str
    elsewhere: str
    record: Record | None


def status_of(server: Found) -> Status:
    """The status of a server that was found."""
    record = server.record
    if record is None:
        reason = server.damage or "it has no record"
        return Status(server.name, server.log, server.alive, "unknown", None, reason, "", "", None)
    if not server.alive and record.state not in _OVER:
        reason, hint = _gone(record), f"`trtforge doctor --log {server.log}` may tell more; start it again."
        return Status(server.name, server.log, False, "failed", None, reason, hint, "", record)
    elsewhere = record.machine if server.alive and record.machine != platform.node() else ""
    return Status(
        server.name,
        server.log,
        server.alive,
        record.state,
        record.since,
        record.reason,
        record.hint,
        elsewhere,
        record,
    )


def _gone(record: Record) -> str:
    """Why a server whose process recorded no end has ended."""
    if record.machine != platform.node():
        return f"its process {record.pid} on {record.machine} was killed, or {record.machine} was restarted"
    if record.boot != boot_of_machine():
        return "this machine was restarted while it ran"
    return f"its process {record.pid} was killed"
