"""The `trtforge` program: its commands and the one place where errors become messages and exit statuses."""

import logging
import sys
import traceback
from io import TextIOWrapper
from shlex import join
from typing import Any

import typer
from rich.console import Console

from trtforge.cli import build, cache, doctor, inspect, migrate, plan, recipes, serving, show, stages
from trtforge.cli.explain import explained
from trtforge.core.errors import ForgeError, LoggedError, UsageError
from trtforge.core.threads import wait_briefly
from trtforge.machine.processes import SIGINT_STATUS, SIGTERM_STATUS, ended_by_sigterm

app = typer.Typer(
    name="trtforge",
    help="A Hugging Face checkpoint in, a verified Triton model repository for TensorRT-LLM out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
build.register(app)
stages.register(app)
serving.register(app)
recipes.register(app)
plan.register(app)
migrate.register(app)
inspect.register(app)
doctor.register(app)
cache.register(app)


_GO_ON = ("build", "calibrate", "convert", "compile", "package", "migrate")
"""The commands that go on, when they are given again, from what they finished."""

_WrongUsage: type[Any] = typer.BadParameter.__mro__[2]
"""click's ClickException: older releases of typer take click's own, newer ones have one of theirs."""


def main() -> None:
    """Run the program. Exit status: 0 done, 1 failed (`error:` and `hint:` on stderr), 2 usage, 130 and 143 after
    SIGINT and SIGTERM, with what was interrupted and how to go on.
    """
    wait_briefly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in files may hold what no encoding has
    log = logging.getLogger("trtforge")
    log.addHandler(_Messages())
    log.setLevel(logging.INFO)
    try:
        with ended_by_sigterm():
            status = app(standalone_mode=False)
    except _WrongUsage as error:
        show_usage(error)
        sys.exit(2)
    except typer.Abort:
        show_error(ForgeError("standard input ended", hint="Give the input, or run it where somebody can answer."))
        sys.exit(1)
    except SystemExit as end:
        if end.code == SIGTERM_STATUS:
            show_interruption("SIGTERM")
        raise
    except LoggedError as error:
        show_error(explained(error))
        sys.exit(1)
    except ForgeError as error:
        show_error(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        show_error(ForgeError(f"{where}{error.strerror or error}", hint="--verbose shows where it happened."))
        sys.exit(1)
    if status == SIGINT_STATUS:
        show_interruption("SIGINT")
    sys.exit(status if isinstance(status, int) else 0)


class _Messages(logging.Handler):
    """Shows what the stages log as they work: waiting for another process, a cache that cannot be used, going on."""

    def emit(self, record: logging.LogRecord) -> None:
        show.warning(record.getMessage()) if record.levelno >= logging.WARNING else show.note(record.getMessage())


def show_interruption(signal: str) -> None:
    """Which command was interrupted, and the one to go on with; --force would begin with nothing."""
    words = sys.argv[1:]
    print(f"interrupted by {signal}: {join(['trtforge', *words])}", file=sys.stderr)
    again = join(["trtforge", *(word for word in words if word != "--force")])
    if words[:1] == ["verify"]:
        print(f"hint: verify keeps nothing; start again: {again}", file=sys.stderr)
    elif words and words[0] in _GO_ON:
        print(f"hint: what is complete is kept; go on: {again}", file=sys.stderr)


def show_usage(error: Any) -> None:
    """What is wrong with a command line, and how the command is used; for a group without a command typer showed it."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), end="")  # nothing, where rich has shown it
        return
    usage = "--help after the command shows its options."
    if getattr(error, "ctx", None) is not None:
        usage = f"{error.ctx.get_usage()}; `{error.ctx.command_path} --help` says more."
    show_error(UsageError(error.format_message(), hint=usage))


def show_error(error: ForgeError) -> None:
    """`error:` and `hint:` on stderr, the trace before them with --verbose."""
    if "--verbose" in sys.argv:
        traceback.print_exc()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(error.message, markup=False)
    console.print("hint:", style="bold", end=" ")
    console.print(error.hint, markup=False)
