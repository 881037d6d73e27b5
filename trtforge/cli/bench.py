"""`trtforge bench`: the speed of a build, a repository or a running server."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.chat import served_build
from trtforge.cli.options import MOST_INT32, Json, Quiet, Verbose, from_options
from trtforge.core.defaults import GRPC_PORT, GRPC_URL
from trtforge.core.errors import ForgeError, Repair, UsageError, mistyped

if TYPE_CHECKING:
    from trtforge.core.progress import Progress
    from trtforge.serve.speed import Load, Speed

_MOST_AT_ONCE = 4096  # each has a thread
_HOST = re.compile(r"localhost|\d+(\.\d+){3}|\[[0-9a-fA-F:]+\]")
_ADDRESS = re.compile(r"(?:grpc://)?[^/\s]+:\d+/?")


def bench(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL_OR_REPO",
            help="Build directory or repository to serve for the measurement, or the gRPC address of a running server.",
            show_default=False,
        ),
    ],
    concurrency: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Requests at once; several levels, one after the other.")
    ] = "1,8",
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Requests at each level; at least as many as run at once.", show_default="16"
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of each prompt; approximate if an address is given.")
    ] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, max=MOST_INT32, metavar="N", help="Length of each answer.")] = 64,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Text model.", show_default="ensemble")] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure the speed of a build or of a running server.

    Sends requests with answers of the same length, several at once, and streams them over gRPC. A build keeps the
    figures and the machine in its bench.json, for `trtforge compare`.

    Example: trtforge bench build/demo-int4awq

    Example: trtforge bench 127.0.0.1:8001 --concurrency 1,8,32
    """
    from trtforge.core.progress import for_this_terminal
    from trtforge.pipeline.speed import busy_processors, this_machine
    from trtforge.serve.speed import Load

    load = from_options(
        Load,
        {
            "concurrency": levels_of(concurrency),
            **({} if requests is None else {"requests": requests}),
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
        },
        "bench",
    )
    if requests is not None and requests < max(load.concurrency):
        show.note(f"--requests {requests}: a level with more requests at once sends as many as run at once")
    progress, place = for_this_terminal(quiet=quiet or json), Path(target)
    if _ADDRESS.fullmatch(target) and not place.exists():
        from trtforge.serve.endpoint import Endpoint

        url = Endpoint.of_grpc(target).url
        _show(_measured(url, model or "ensemble", load, None, progress), f"server {url}", None, json=json)
        return
    if not place.exists():
        raise _nothing_at(target, place)
    busy, machine = busy_processors(), this_machine()
    with served_build(place, quiet=quiet or json) as (server, served):
        speed = _measured(server.grpc, model or served, load, _tokenizer(place), progress)
    _show(speed, machine, _kept(place, speed, machine, busy), json=json, busy=busy)


def _nothing_at(target: str, place: Path) -> ForgeError:
    """The error for a target that is neither there nor an address."""
    from trtforge.core.nearest import nearest_directory

    give = f"a build directory, or the gRPC address of a running server as HOST:PORT, such as {GRPC_URL}"
    if _HOST.fullmatch(target):
        meant = f"{target}:{GRPC_PORT}"
        error = ForgeError(f"{target}: no such directory, and an address needs its port", hint=f"Give {give}.")
        return error.repaired_by(Repair(target, meant))
    said = f"{target}: neither a directory nor HOST:PORT"
    return mistyped(said, target, nearest_directory(place), otherwise=f"Give {give}.")


def levels_of(text: str) -> tuple[int, ...]:
    """The levels of --concurrency. Raises UsageError."""
    levels = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 5 and 0 < int(word) <= _MOST_AT_ONCE for word in levels):
        wrong = f"--concurrency {text:.200}: not numbers from 1 to {_MOST_AT_ONCE}"
        raise UsageError(wrong, hint="For example --concurrency 1,8,32.")
    return tuple(dict.fromkeys(map(int, levels)))


def _tokenizer(place: Path) -> Path | None:
    """The tokenizer.json of a build's repository."""
    from trtforge.cli.places import artifact_at
    from trtforge.formats.hf import TOKENIZER_DIRECTORY
    from trtforge.formats.tokenizer import TOKENIZER_FILE

    found = sorted(artifact_at(place, "repository").glob(f"*/1/{TOKENIZER_DIRECTORY}/{TOKENIZER_FILE}"))
    return found[0] if found else None


def _measured(url: str, model: str, load: "Load", tokenizer: Path | None, progress: "Progress") -> "Speed":
    from trtforge.serve.speed import measure, requests_of

    with progress.bar("bench", requests_of(load), "requests") as bar:
        return measure(url, model, load, tokenizer, done=lambda: bar.advance(1))


def _kept(place: Path, speed: "Speed", machine: str, busy: float | None) -> Path | None:
    """The file with the figures of a build; None for a repository that is not part of one, or if it is not writable."""
    from trtforge.cli.places import build_of
    from trtforge.pipeline.speed import keep_speed

    build = build_of(place)
    if build is None:
        return None
    try:
        return keep_speed(build, speed, machine, busy)
    except ForgeError as error:  # the figures are shown all the same
        show.warning(f"the results could not be saved: {error.message}")
        return None


def _show(speed: "Speed", where: str, file: Path | None, *, json: bool, busy: float | None = None) -> None:
    if json:
        found = speed.model_dump(mode="json")
        show.as_json({**found, "where": where, "busy": busy, "file": str(file) if file else None})
        return
    rows = [("at once", "requests", "tokens/s", "first text", "each further token")]
    rows += [
        (
            str(level.concurrency),
            str(level.requests),
            f"{level.tokens_per_second:,.1f}",
            f"{level.first_text_ms:,.0f} ms",
            f"{level.next_token_ms:,.1f} ms",
        )
        for level in speed.levels
    ]
    print("\n".join(show.columns(rows, right=range(5))))
    show.line(f"prompts of {speed.prompt_tokens} tokens, answers of {speed.answer_tokens}; {where}")
    if busy is not None:
        show.line(f"processors busy with other work before: {busy:g}")
    if file is not None:
        show.line(f"kept in {show.path(file)}")
