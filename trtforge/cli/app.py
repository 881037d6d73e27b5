"""The `trtforge` program: its commands and the one place where errors become messages and exit statuses."""

import sys
import traceback

import typer
from rich.console import Console

from trtforge.cli import build, doctor, inspect, migrate, plan, recipes, serving, stages
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.threads import wait_briefly

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


def main() -> None:
    """Run the program. Exit status: 0 done, 1 failed (`error:` and `hint:` on stderr), 2 usage, 130 interrupted."""
    wait_briefly()
    try:
        app()
    except ForgeError as error:
        show_error(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        show_error(ForgeError(f"{where}{error.strerror or error}", hint="--verbose shows where it happened."))
        sys.exit(1)


def show_error(error: ForgeError) -> None:
    """`error:` and `hint:` on stderr, the trace before them with --verbose."""
    if "--verbose" in sys.argv:
        traceback.print_exc()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(error.message, markup=False)
    console.print("hint:", style="bold", end=" ")
    console.print(error.hint, markup=False)
