"""The `trtforge` program: its commands, and the mapping of errors to messages and exit statuses."""

import logging
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from shlex import join
from typing import Any

import typer

from trtforge.cli import show
from trtforge.cli.build import build
from trtforge.cli.cache import cache
from trtforge.cli.calibrate import calibrate
from trtforge.cli.compile import compile_
from trtforge.cli.convert import convert
from trtforge.cli.doctor import doctor
from trtforge.cli.explain import explained
from trtforge.cli.help import Command, Group
from trtforge.cli.inspect import inspect, version
from trtforge.cli.migrate import migrate
from trtforge.cli.package import package
from trtforge.cli.plan import plan
from trtforge.cli.recipes import recipes
from trtforge.cli.serving import generate, infer, probe, serve
from trtforge.cli.verify import verify
from trtforge.core.errors import ForgeError, LoggedError, UsageError
from trtforge.core.threads import wait_briefly
from trtforge.machine.processes import SIGINT_STATUS, SIGTERM_STATUS, ended_by_sigterm

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Build": {"build": build, "plan": plan},
    "Stages": {
        "calibrate": calibrate,
        "convert": convert,
        "verify": verify,
        "compile": compile_,
        "package": package,
        "migrate": migrate,
    },
    "Serving": {"serve": serve, "infer": infer, "generate": generate, "probe": probe},
    "Inspection": {"inspect": inspect, "doctor": doctor, "version": version},
}
"""The commands by their group in `--help`."""

app = typer.Typer(
    name="trtforge",
    cls=Group,
    help="Turn a Hugging Face checkpoint into a verified Triton model repository for TensorRT-LLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
for _group, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_group)(_command)
app.add_typer(recipes, name="recipes", rich_help_panel="Build")
app.add_typer(cache, name="cache", rich_help_panel="Inspection")

_RESUMABLE = ("build", "calibrate", "convert", "compile", "package", "migrate")
"""The commands that resume from what they finished when they are run again."""

_WrongUsage: type[Any] = typer.BadParameter.__mro__[2]
"""ClickException: click's own in older releases of typer, typer's copy in newer ones."""


def main() -> None:
    """Run the program and exit: 0 done, 1 failed, 2 wrong usage, 130 and 143 after SIGINT and SIGTERM.

    A failure prints `error:` and `hint:` on stderr, an interruption the command that resumes the work.
    """
    wait_briefly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in files may not be encodable
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
        show_error(
            ForgeError(
                "standard input ended before the input", hint="Provide the input, or run the command in a terminal."
            )
        )
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
        show_error(ForgeError(f"{where}{error.strerror or error}", hint="Add --verbose for the traceback."))
        sys.exit(1)
    if status == SIGINT_STATUS:
        show_interruption("SIGINT")
    sys.exit(status if isinstance(status, int) else 0)


class _Messages(logging.Handler):
    """Prints the log records of the stages: notes, and warnings from WARNING on."""

    def emit(self, record: logging.LogRecord) -> None:
        show.warning(record.getMessage()) if record.levelno >= logging.WARNING else show.note(record.getMessage())


def show_interruption(signal: str) -> None:
    """Print the interrupted command and the command that resumes it, without --force, which would start over."""
    words = sys.argv[1:]
    print(f"interrupted by {signal}: {join(['trtforge', *words])}", file=sys.stderr)
    again = join(["trtforge", *(word for word in words if word != "--force")])
    if words[:1] == ["verify"]:
        print(f"hint: verify keeps no intermediate results; run again: {again}", file=sys.stderr)
    elif words and words[0] in _RESUMABLE:
        print(f"hint: completed work is kept; resume with: {again}", file=sys.stderr)


def show_usage(error: Any) -> None:
    """Print what is wrong with a command line and the command's usage, or the help of a group without a command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return
    usage = "Add --help after the command to see its options."
    if getattr(error, "ctx", None) is not None:
        usage = f"{error.ctx.get_usage()}; see `{error.ctx.command_path} --help`."
    show_error(UsageError(error.format_message(), hint=usage))


def show_error(error: ForgeError) -> None:
    """Print `error:` and `hint:` on stderr, after the traceback with --verbose."""
    from rich.console import Console

    if "--verbose" in sys.argv:
        traceback.print_exc()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(error.message, markup=False)
    console.print("hint:", style="bold", end=" ")
    console.print(error.hint, markup=False)
