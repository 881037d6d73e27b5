"""`trtforge cache`: list and prune the cache of calibrations, verifications and engines."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import show
from trtforge.cli.help import Command, Group
from trtforge.cli.options import Json, Verbose
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.figures import counted, moment

if TYPE_CHECKING:
    from trtforge.core.cache_entry import Entry
    from trtforge.core.cache_prune import Pruned, PruneLimits
    from trtforge.core.timings import Timings

_SHOWN = 12

cache = typer.Typer(
    cls=Group,
    help="List and prune the cache.\n\n"
    "It keeps calibrations, verifications and engines for builds in other directories.\n\n"
    "TRTFORGE_CACHE sets its directory; TRTFORGE_CACHE=off disables it.\n\n"
    "Example: trtforge cache prune --max-size 200GB",
    no_args_is_help=True,
)


@cache.command("list", cls=Command)
def list_cache(json: Json = False, verbose: Verbose = False) -> None:
    """List all entries, the most recently used first.

    Example: trtforge cache list --json
    """
    from trtforge.core.cache_prune import list_entries
    from trtforge.core.timings import list_timings

    root = _directory()
    with _using(root, "read"):
        entries, timings = (list_entries(root), list_timings(root)) if root is not None else ((), ())
    total = sum(entry.bytes for entry in entries) + sum(each.bytes for each in timings)
    if json:
        show.as_json(
            {
                "directory": None if root is None else str(root),
                "entries": [_as_json(entry) for entry in entries],
                "timings": [_timings_as_json(each) for each in timings],
                "bytes": total,
            }
        )
        return
    if root is None:
        print(_no_cache())
        return
    rows = [
        [entry.key[:_SHOWN], entry.stage, show.size(entry.bytes), _ago(entry.last_used), str(entry.about)]
        for entry in entries
    ]
    rows += [["", "timings", show.size(each.bytes), _ago(each.last_used), each.name] for each in timings]
    title = f"{root}: {counted(len(entries), 'entry', 'entries')}, {show.size(total)}"
    show.table(title, ["key", "kind", "size", "last used", "content"], rows, prose=True)


@cache.command("prune", cls=Command)
def prune_cache(
    older_than: Annotated[
        float | None,
        typer.Option(min=0, metavar="DAYS", help="Remove entries unused for this long.", show_default=False),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size to keep, most recently used first, such as 200GB.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every entry.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Remove cache entries, the least recently used first.

    Without options, entries unused for 30 days are removed. Entries in use by a running build are kept. TensorRT's
    timing caches are removed by age or with --all.

    Example: trtforge cache prune --older-than 14 --max-size 200GB --dry-run
    """
    from trtforge.core.cache_prune import DEFAULT_DAYS, PruneLimits
    from trtforge.core.sizes import parse_size

    if everything and (older_than is not None or max_size is not None):
        raise UsageError("--all with --older-than or --max-size", hint="Give --all alone; it removes every entry.")
    size = parse_size(max_size, "--max-size") if max_size is not None else None
    if older_than is None and size is None and not everything:
        older_than = DEFAULT_DAYS
    root = _directory()
    pruned, timings = _prune(root, PruneLimits(older_than, size, everything), dry_run=dry_run)
    if json:
        show.as_json(
            {
                "directory": None if root is None else str(root),
                "dry_run": dry_run,
                "removed": [_as_json(entry) for entry in pruned.removed],
                "in_use": [_as_json(entry) for entry in pruned.in_use],
                "timings": [_timings_as_json(each) for each in timings],
                "bytes": pruned.bytes + sum(each.bytes for each in timings),
            }
        )
        return
    if root is None:
        print(_no_cache())
        return
    _say(pruned, timings, "would be removed" if dry_run else "removed")


def _directory() -> Path | None:
    """The cache's directory; None without a cache. Raises ForgeError if something else is there."""
    from trtforge.core.cache import VARIABLE, cache_directory

    root = cache_directory()
    if root is not None and root.exists() and not root.is_dir():
        raise ForgeError(f"the cache {root} is a file", hint=f"Set {VARIABLE} to a directory.")
    return root


def _no_cache() -> str:
    from trtforge.core.cache import VARIABLE, is_off

    why = f"it is off ({VARIABLE})" if is_off() else f"this user has no home directory; set {VARIABLE} to a directory"
    return f"no cache: {why}"


def _prune(root: Path | None, limits: "PruneLimits", *, dry_run: bool) -> "tuple[Pruned, Sequence[Timings]]":
    """What is removed, or with `dry_run` would be."""
    from trtforge.core.cache_prune import Pruned, is_free, list_entries, prune, remove, sweep
    from trtforge.core.cache_records import prune_cached
    from trtforge.core.timings import list_timings, sweep_drafts, unused

    if root is None:
        return Pruned((), ()), ()
    with _using(root, "changed"):
        pruned = prune(list_entries(root), limits, time.time(), is_free if dry_run else remove)
        timings = unused(list_timings(root), limits, time.time())
        if not dry_run:
            sweep(root)
            sweep_drafts(root, time.time())
            prune_cached(root, lambda last_used: limits.expired(last_used, time.time()))
            for each in timings:
                each.path.unlink(missing_ok=True)
    return pruned, timings


@contextmanager
def _using(root: Path | None, what: str) -> Iterator[None]:
    """Raises ForgeError for files of the cache that cannot be read, locked or removed."""
    from trtforge.core.cache import VARIABLE

    try:
        yield
    except OSError as error:
        raise ForgeError(
            f"the cache {root} cannot be {what}: {error.filename or root}: {error.strerror}",
            hint=f"Be the user who may do that, or set {VARIABLE} to another directory.",
        ) from None


def _say(pruned: "Pruned", timings: "Sequence[Timings]", what: str) -> None:
    for word, entries in ((what, pruned.removed), ("in use", pruned.in_use)):
        for entry in entries:
            print(f"{word}: {entry.key[:_SHOWN]} {entry.stage}, {show.size(entry.bytes)}: {entry.about}")
    for each in timings:
        print(f"{what}: timing cache {each.name}, {show.size(each.bytes)}")
    total = show.size(pruned.bytes + sum(each.bytes for each in timings))
    caches = f" and {counted(len(timings), 'timing cache')}" if timings else ""
    print(f"{counted(len(pruned.removed), 'entry', 'entries')}{caches} with {total} {what}")


def _ago(moment: float) -> str:
    days = max(0.0, time.time() - moment) / 86400
    return "today" if days < 1 else f"{counted(round(days), 'day')} ago"


def _as_json(entry: "Entry") -> dict[str, Any]:
    return {
        "key": entry.key,
        "kind": entry.stage,
        "bytes": entry.bytes,
        "last_used": moment(entry.last_used),
        "about": entry.about.model_dump(mode="json"),
    }


def _timings_as_json(timings: "Timings") -> dict[str, Any]:
    return {"name": timings.name, "bytes": timings.bytes, "last_used": moment(timings.last_used)}
