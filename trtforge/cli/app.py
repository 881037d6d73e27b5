"""The `trtforge` program: its commands, and the mapping of errors to messages and exit statuses."""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from shlex import join, split
from typing import Annotated, Any

import typer

from trtforge import __version__
from trtforge.cli import show
from trtforge.cli.adopt import adopt
from trtforge.cli.advise import advise
from trtforge.cli.bench import bench
from trtforge.cli.build import build
from trtforge.cli.cache import cache
from trtforge.cli.calibrate import calibrate
from trtforge.cli.chat import chat
from trtforge.cli.compare import compare
from trtforge.cli.compile import compile_
from trtforge.cli.convert import convert
from trtforge.cli.deploy import deploy
from trtforge.cli.detached import status, stop
from trtforge.cli.doctor import doctor
from trtforge.cli.exit_status import DONE, FAILED, HUNG_UP, INTERRUPTED, TERMINATED, WRONG_USAGE, status_of
from trtforge.cli.explain import explained
from trtforge.cli.gateway import gateway
from trtforge.cli.generate import generate
from trtforge.cli.help import Command, Group
from trtforge.cli.hints import for_command, repaired
from trtforge.cli.infer import infer
from trtforge.cli.init import init
from trtforge.cli.inspect import inspect, version
from trtforge.cli.migrate import migrate
from trtforge.cli.package import package
from trtforge.cli.plan import plan
from trtforge.cli.recipes import recipes
from trtforge.cli.resumption import resumes
from trtforge.cli.run import run
from trtforge.cli.serving import probe, serve
from trtforge.cli.system_errors import system_failure
from trtforge.cli.tune import tune
from trtforge.cli.verify import verify
from trtforge.core.errors import ForgeError, LoggedError, Repair, UsageError
from trtforge.core.nearest import nearest_name
from trtforge.core.threads import wait_briefly
from trtforge.machine.cgroups import heed_quota
from trtforge.machine.interruptions import ended_by_signals

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Build": {"run": run, "build": build, "init": init, "plan": plan, "compare": compare},
    "Stages": {
        "calibrate": calibrate,
        "convert": convert,
        "verify": verify,
        "compile": compile_,
        "package": package,
        "adopt": adopt,
        "migrate": migrate,
    },
    "Serving": {
        "chat": chat,
        "serve": serve,
        "status": status,
        "stop": stop,
        "gateway": gateway,
        "infer": infer,
        "generate": generate,
        "bench": bench,
        "tune": tune,
        "advise": advise,
        "probe": probe,
    },
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


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trtforge {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version of trtforge.")
    ] = False,
) -> None:
    """The options of the program itself."""


for _group, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_group)(_command)
app.add_typer(recipes, name="recipes", rich_help_panel="Build")
app.add_typer(deploy, name="deploy", rich_help_panel="Serving")
app.add_typer(cache, name="cache", rich_help_panel="Inspection")

_WrongUsage: type[Any] = typer.BadParameter.__mro__[2]
"""ClickException: click's own in older releases of typer, typer's copy in newer ones."""


def main() -> None:
    """Run the program and exit: 0 done, 1 failed, 2 wrong usage, 130, 143 and 129 after SIGINT, SIGTERM and SIGHUP.

    A failure prints `error:` and `hint:` on stderr, and with --json an object on stdout; an interruption prints the
    command that resumes the work.
    """
    with show.one_json_object():
        _run()


def _run() -> None:
    wait_briefly()
    heed_quota()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in files may not be encodable
    log = logging.getLogger("trtforge")
    if not any(isinstance(handler, _Messages) for handler in log.handlers):
        log.addHandler(_Messages())
    log.setLevel(logging.INFO)
    try:
        _require_directory()
        with ended_by_signals():
            code = app(prog_name="trtforge", standalone_mode=False)
        sys.stdout.flush()
    except _WrongUsage as error:
        show_usage(error)
        sys.exit(WRONG_USAGE)
    except typer.Abort:
        show_error(
            ForgeError(
                "standard input ended before the input", hint="Provide the input, or run the command in a terminal."
            )
        )
        sys.exit(FAILED)
    except SystemExit as end:
        if end.code in (TERMINATED, HUNG_UP):
            show_interruption("SIGTERM" if end.code == TERMINATED else "SIGHUP")
        raise
    except LoggedError as error:
        show_error(explained(error))
        sys.exit(status_of(error))
    except ForgeError as error:
        show_error(error)
        sys.exit(status_of(error))
    except Exception as error:
        failure = system_failure(error)
        if failure is None:
            raise
        traceback.clear_frames(error.__traceback__)  # where memory ran out, what they hold is in the way
        show_error(failure)
        sys.exit(FAILED)
    finally:
        _discard_unwritten()
    if code == INTERRUPTED:
        show_interruption("SIGINT")
    sys.exit(code if isinstance(code, int) else DONE)


def _discard_unwritten() -> None:
    """Discard what cannot be written to stdout; otherwise the interpreter reports it when it exits."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _require_directory() -> None:
    """Raise ForgeError if the current directory was deleted, which many libraries answer with errors of their own."""
    try:
        os.getcwd()
    except OSError as error:
        raise ForgeError(
            f"the current directory: {error.strerror}", hint="Change to a directory that exists."
        ) from None


class _Messages(logging.Handler):
    """Prints the log records of the stages: notes, and warnings from WARNING on."""

    def emit(self, record: logging.LogRecord) -> None:
        show.warning(record.getMessage()) if record.levelno >= logging.WARNING else show.note(record.getMessage())


def show_interruption(signal: str) -> None:
    """Print what `interruption` says."""
    print(interruption(signal), file=sys.stderr)


def interruption(signal: str) -> str:
    """The interrupted command and the command that resumes it, without --force, which would start over.

    "interrupted" for Ctrl-C of a command that keeps nothing. The stages log what they keep.
    """
    words = sys.argv[1:]
    command = words[0] if words else ""
    if signal == "SIGINT" and command != "verify" and not resumes(command):
        return "interrupted"
    said = f"interrupted by {signal}: {join(['trtforge', *words])}"
    again = join(["trtforge", *(word for word in words if word != "--force")])
    if command == "verify":
        return f"{said}\nhint: verify keeps no intermediate results; run again: {again}"
    return f"{said}\nhint: run again: {again}" if resumes(command) else said


def _whole_hint(error: ForgeError, words: Sequence[str]) -> str:
    """The hint in the words of the command that was run, with the whole command that would work if it is known."""
    options = options_of(words)
    hint = for_command(error.hint, options)
    command = repaired(words, error.repair, options) if error.repair is not None else None
    if command is None or "Run `" in hint or not _is_read(split(command)[1:]):
        return hint
    return f"{hint} Run `{command}`."


def options_of(words: Sequence[str]) -> frozenset[str]:
    """The options of the command that a command line names; none if it names no command."""
    command, _ = _command_of(words)
    names = (name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))
    return frozenset(name for name in names if name.startswith("-"))  # an argument's is its own


def _command_of(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """The command or group that a command line begins with, the program itself if none, and the words after it."""
    command: Any = typer.main.get_command(app)
    for number, word in enumerate(words):
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            return command, words[number:]
        command = inner
    return command, ()


def show_usage(error: Any) -> None:
    """Print what is wrong with a command line and the command's usage, or the help of a group without a command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return
    usage = "Add --help after the command to see its options."
    if getattr(error, "ctx", None) is not None:
        usage = f"{error.ctx.get_usage()}; see `{error.ctx.command_path} --help`."
    meant = _meant(error, sys.argv[1:])
    hint = f"Did you mean {meant.right}?" if meant else usage
    guesses = type(error).__name__ == "NoSuchOption"  # format_message adds names that are not close
    said = error.message if guesses else error.format_message()
    show_error(UsageError(said, hint=hint).repaired_by(meant))


def _meant(error: Any, words: Sequence[str]) -> Repair | None:
    """The command or option that a mistyped one is nearest to; for a letter, the only option that begins with it."""
    group = getattr(error, "ctx", None) and error.ctx.command
    if type(error).__name__ == "NoSuchOption":
        wrong, known = error.option_name, options_of(words)
    elif "No such command" in error.format_message():
        named = re.search(r"No such command '([^']*)'", error.format_message())
        wrong, known = named[1] if named else "", frozenset(getattr(group, "commands", {}))
    else:
        return None
    nearest = nearest_name(wrong, known)
    if re.fullmatch("-[a-z]", wrong):
        begun = [option for option in known if option.startswith(f"-{wrong}")]
        nearest = begun[0] if len(begun) == 1 else None
    return Repair(wrong, nearest) if nearest else None


def _is_read(words: Sequence[str]) -> bool:
    """Whether a command line names a command, with arguments and options that it takes; nothing is run."""
    command, rest = _command_of(words)
    if hasattr(command, "commands"):
        return False
    try:
        command.make_context(command.name, list(rest))
    except (_WrongUsage, typer.Exit):
        return False
    return True


def show_error(error: ForgeError) -> None:
    """Print `error:` and `hint:` on stderr, after the traceback with --verbose; with --json on stdout too."""
    try:
        _show_error(error)
    except MemoryError:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)


def _show_error(error: ForgeError) -> None:
    from rich.console import Console
    from rich.text import Text

    if "--verbose" in sys.argv:
        traceback.print_exc()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    hint = _whole_hint(error, sys.argv[1:])
    if "--json" in sys.argv:
        show.error_as_json(error, hint)
    for label, style, said in (("error:", "bold red", error.message), ("hint:", "bold", hint)):
        line = f"{label} {said}"
        # `Text`, because rich takes :words: and [words] in strings for emoji and markup.
        text = Text(show.wrapped(line, show.width(sys.stderr)) if sys.stderr.isatty() else line)
        text.stylize(style, 0, len(label))
        console.print(text)
