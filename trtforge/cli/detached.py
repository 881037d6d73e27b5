"""`trtforge serve --detach`, `status` and `stop`: servers in the background."""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import completion, show
from trtforge.cli.exit_status import DONE, FAILED
from trtforge.cli.options import Json, Quiet, Verbose
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.figures import counted, moment
from trtforge.core.interpreter import module_arguments

if TYPE_CHECKING:
    from trtforge.serve.config import ServeConfig
    from trtforge.serve.detached.status import Status
    from trtforge.serve.detached.stop import Stopped

_NONE = "no server runs in the background: `trtforge serve REPO --detach` starts one"
_LABEL = ("error:", "hint:", "note:", "warning:")

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", autocompletion=completion.servers, help="The server's name.", show_default=False),
]


def serve_detached(config: "ServeConfig", repository: Path, ports: Sequence[str]) -> int:
    """Serve in the background; the exit status. In the process that this starts: serve, until it is stopped.

    `ports`: options with the ports that were chosen in place of 0, which that process gets too.
    """
    from trtforge.core.manifest import require_manifest
    from trtforge.formats.triton import read_facts
    from trtforge.serve.announcements import Printed
    from trtforge.serve.detached.process import inherited
    from trtforge.serve.detached.start import NotReadyError, start
    from trtforge.serve.stage import serve

    background = inherited()
    if background is not None:
        return background.run(lambda: serve(config, repository, background))
    model = read_facts(require_manifest(repository, "repository")).model("ensemble")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)  # of the options
    command = [sys.executable, *module_arguments("trtforge"), *words[:end], *ports, *words[end:]]
    try:
        server = start(config, repository, command, Printed(), _show)
    except NotReadyError as error:
        return error.status
    print(f"name={server.name} pid={server.record.pid} log={server.log}")
    chat = f"trtforge chat --url {server.record.grpc}" + ("" if model == "ensemble" else f" --model {model}")
    commands = (chat, f"trtforge status {server.name}", f"trtforge stop {server.name}")
    print("\n".join((f"{server.name} runs in the background:", *commands)), file=sys.stderr)
    return DONE


def _show(line: str) -> None:
    """A line of the log of a server that starts, as this command would print it."""
    label, _, text = line.partition(" ")
    if label in _LABEL:
        show.message(label, text)
    else:
        print(line, file=sys.stderr)


def status(name: Name = None, json: Json = False, verbose: Verbose = False) -> None:
    """Show the servers that were started with --detach.

    States: starting, ready, draining, restarting, stopped, failed. Ended servers are listed for a week. Exit status
    0; with NAME, 0 only if that server is ready, else 1.

    Example: trtforge status

    Example: trtforge status demo-int4awq --json
    """
    from trtforge.serve.detached.registry import Registry, named
    from trtforge.serve.detached.status import status_of

    servers = Registry.of_user().seen()
    if name is not None:
        servers = [named(servers, name)]
    found = [status_of(server) for server in servers]
    if json:
        show.as_json({"servers": [_as_json(each) for each in found]})
    elif not found:
        show.line(_NONE)
    else:
        _print(found)
    if name is not None and found[0].state != "ready":
        raise typer.Exit(FAILED)


def stop(
    name: Name = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Stop a server that was started with --detach.

    Without NAME, the only server is stopped. Running requests have the server's --drain-timeout to finish; 30 s later
    the server is killed. Its record and log are removed. Exit status 1 if requests were cut or the server was killed.

    Example: trtforge stop demo-int4awq
    """
    from trtforge.core.progress import for_this_terminal
    from trtforge.serve.detached.registry import Registry
    from trtforge.serve.detached.stop import ask, chosen, wait

    if everything and name is not None:
        raise UsageError("--all cannot be combined with NAME", hint="Give one of them.")
    registry = Registry.of_user()
    servers = registry.seen() if everything else [chosen(registry, name)]
    asked, stopped = [], []
    for server in servers:
        try:
            ask(registry, server)
            asked.append(server)
        except ForgeError as error:
            if not everything:
                raise
            show.warning(error.message)
    for server in asked:
        progress = for_this_terminal(quiet=quiet)
        with progress.waiting(f"stopping {server.name}") if server.alive else nullcontext():
            stopped.append(wait(registry, server))
        if not json:
            _say(stopped[-1])
    if json:
        show.as_json({"servers": [vars(each) for each in stopped]})
    elif not servers:
        show.line(_NONE)
    if len(asked) < len(servers) or not all(each.is_clean for each in stopped):
        raise typer.Exit(FAILED)


def _say(stopped: "Stopped") -> None:
    if stopped.outcome == "had ended":
        show.line(f"{stopped.name} had ended: {stopped.reason}\nits record and its log are removed")
    else:
        outcome = "" if stopped.reason.startswith(stopped.outcome) else f"{stopped.outcome}: "
        show.line(f"{stopped.name}: {outcome}{stopped.reason}")


def _print(found: Sequence["Status"]) -> None:
    """A table on a terminal, elsewhere a line for each server; then what is to be said of some of them."""
    if sys.stdout.isatty():
        show.table(
            counted(len(found), "server"),
            ["name", "state", "since", "repository and addresses", "pid"],
            [
                [each.name, _state(each, "\n"), _since(each, "\n"), "\n".join(_where(each)), _pid(each)]
                for each in found
            ],
            prose=True,
        )
    else:
        rows = [
            [each.name, _state(each, ", "), _since(each, " "), _pid(each), " ".join(_where(each))] for each in found
        ]
        print("\n".join(show.columns([["name", "state", "since", "pid", "repository and addresses"], *rows])))
    for each in found:
        if each.reason:
            show.line(f"{each.name}: {each.reason}")
        if each.hint and not each.alive:
            show.line(f"hint: {each.hint}")
        if each.reason or len(found) == 1:
            print(f"log: {each.log}")


def _state(status: "Status", between: str) -> str:
    restarts = status.record.restarts if status.record is not None else 0
    parts = [
        status.state,
        counted(restarts, "restart") if restarts else "",
        f"on {status.elsewhere}" if status.elsewhere else "",
    ]
    return between.join(part for part in parts if part)


def _since(status: "Status", between: str) -> str:
    if status.since is None:
        return "-"
    return time.strftime(f"%Y-%m-%d{between}%H:%M:%S", time.localtime(status.since))


def _pid(status: "Status") -> str:
    return str(status.record.pid) if status.alive and status.record is not None else "-"


def _where(status: "Status") -> list[str]:
    """The repository, and the addresses of a server that runs, as `serve` prints them."""
    record = status.record
    if record is None:
        return ["-"]
    addresses = [f"http={record.http}", f"grpc={record.grpc}", f"metrics={record.metrics}"]
    if record.openai is not None:
        addresses.append(f"openai={record.openai}")
    return [show.path(record.repository), *(addresses if status.alive else ())]


def _as_json(status: "Status") -> dict[str, Any]:
    record = status.record
    known = (
        {}
        if record is None
        else {
            "repository": record.repository,
            "http": record.http,
            "grpc": record.grpc,
            "metrics": record.metrics,
            "openai": record.openai,
            "machine": record.machine,
            "pid": record.pid,
            "started": moment(record.begun),
            "restarts": record.restarts,
            "exit_status": record.exit_status,
        }
    )
    since = None if status.since is None else moment(status.since)
    return {
        "name": status.name,
        "state": status.state,
        "since": since,
        "running": status.alive,
        "reason": status.reason or None,
        "hint": status.hint or None,
        "log": str(status.log),
        **known,
    }
