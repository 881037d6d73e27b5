"""What `trtforge build`, `run` and `init` work on: a recipe, or one that is derived for a model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING

import typer

from trtforge.core.assets import asset_directory
from trtforge.core.builds import RECIPE_FILE
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.operands import operand
from trtforge.core.replace import replace_text

if TYPE_CHECKING:
    from trtforge.core.recipe import Recipe
    from trtforge.pipeline.build import Finished, Started
    from trtforge.pipeline.derivation import DerivedRecipe, Wish
    from trtforge.pipeline.report import StageReport
    from trtforge.pipeline.stages import StageName
    from trtforge.plan.alternatives import Goal

_SHIPPED = "recipes"


@dataclass(frozen=True)
class Choice:
    """The options that choose formats, layout and hardware; None: not given."""

    quant: str | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    gpu: str | None = None
    goal: str | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """The recipe's keys and values that these options stand for."""
        return tuple(self.named_settings)

    @property
    def named_settings(self) -> dict[str, str]:
        """`settings`, with the option that each stands for."""
        keys = {
            "quant": "quantization.format",
            "tp": "parallel.tp",
            "pp": "parallel.pp",
            "ep": "parallel.ep",
            "gpu": "engine.target.gpu",
        }
        given = {name: value for name in keys if (value := getattr(self, name)) is not None}
        return {f"{keys[name]}={value}": f"--{name} {value}" for name, value in given.items()}

    @property
    def words(self) -> tuple[str, ...]:
        """The options on a command line."""
        return tuple(
            word for name, value in vars(self).items() if value is not None for word in (f"--{name}", str(value))
        )

    def wish(self) -> "Wish":
        """The choices as `derive` takes them. Raises typer.BadParameter for an unknown goal."""
        from trtforge.pipeline.derivation import Wish
        from trtforge.plan.request import Option

        given: dict[Option, object] = {"--quant": self.quant, "--tp": self.tp, "--pp": self.pp, "--ep": self.ep}
        options = {option: str(value) for option, value in given.items() if value is not None}
        return Wish(options, self.gpu, _goal(self.goal))


@dataclass(frozen=True)
class Chosen:
    """A recipe to build. `words`: what chooses it again on a command line; `out`: its build directory.

    `lock_directory`: where its lock file is. `text`: the YAML of a derived recipe, which belongs into `out`. `options`:
    what else its build was given that a later command needs.
    """

    recipe: "Recipe"
    words: tuple[str, ...]
    out: Path
    lock_directory: Path
    text: str | None = None
    options: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """`words` and `options` as a shell takes them."""
        return join((*self.words, *self.options))

    @property
    def command(self) -> str:
        """The command that builds it."""
        return f"trtforge build {self.named} --out {quote(str(self.out))}"

    @property
    def path(self) -> Path:
        """Where a derived recipe is written."""
        return self.out / RECIPE_FILE

    def require_own(self) -> None:
        """Raises ForgeError if another recipe, that was not derived or was edited, is where a derived one belongs."""
        from trtforge.pipeline.derivation import is_unedited

        path = self.path
        if self.text is None or not path.exists():
            return
        try:
            there = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ForgeError(f"{path}: {error.strerror}", hint="Choose another --out.") from None
        if not is_unedited(there):
            raise ForgeError(
                f"{path} is not a recipe that trtforge derived, or was edited",
                hint=f"Build it with `trtforge build {quote(str(path))}`, or choose another --out.",
            )

    def write(self) -> Path | None:
        """Write a derived recipe into its build directory; returns its path. Raises ForgeError as `require_own`."""
        if self.text is None:
            return None
        self.require_own()
        try:
            os.makedirs(os.path.realpath(self.out), exist_ok=True)  # where a link leads, as stages do
            replace_text(self.path, self.text)
        except OSError as error:
            raise ForgeError(f"{self.path}: {error.strerror}", hint="Choose another --out.") from None
        return self.path

    def written_during(self, started: "Started", finished: "Finished") -> "tuple[Started, Finished]":
        """`started` and `finished`, for a build to call around each stage, extended to write the derived recipe once.

        It is written when the first stage starts or, over the recipe of an earlier build, when that stage has finished:
        a failure before leaves the directory as it was.
        """
        written = False

        def write_once() -> None:
            nonlocal written
            if not written:
                self.write()
            written = True

        def begin(stage: "StageName") -> None:
            if not self.path.exists():
                write_once()
            started(stage)

        def end(stage: "StageReport") -> None:
            write_once()
            finished(stage)

        return begin, end


def choose(target: str, choice: Choice, overrides: tuple[str, ...] = (), out: Path | None = None) -> Chosen:
    """The recipe at `target`: a recipe file, a shipped recipe's name, a model, or a build directory; see `located`.

    Raises ForgeError if it is none of them, or a build that options would replace; UsageError for --goal with a recipe.
    """
    target = located(target)
    if is_model(target):
        return _derived(target, choice, overrides, out)
    from trtforge.cli.recipes import find
    from trtforge.core.recipe import load_recipe

    if choice.goal is not None:
        raise UsageError(
            "--goal applies to models: a recipe says its formats", hint="Use --quant, or give the model itself."
        )
    directory = Path(target)
    kept = directory / RECIPE_FILE
    path = kept if kept.is_file() else find(target, models=True)
    settings = (*choice.settings, *overrides)
    recipe = load_recipe(path, settings, choice.named_settings)
    words = (operand(target), *(word for value in settings for word in ("--set", value)))
    built = directory if kept.is_file() else Path("build") / recipe.name
    if settings and out is None and kept.is_file() and recipe != load_recipe(kept):
        asked = (*choice.named_settings.values(), *(f"--set {value}" for value in overrides))
        raise ForgeError(
            f"{target} was built without {', '.join(asked)}",
            hint=f"Add --out DIR for another build, or change {quote(str(kept))}.",
        )
    lock_directory = path.parent if Path(target).exists() else Path()
    return Chosen(recipe, words, out or built, lock_directory)


def choose_each(
    target: str, formats: Sequence[str], choice: Choice, overrides: tuple[str, ...] = (), out: Path | None = None
) -> dict[str, Chosen]:
    """The choice for each format, as `choose` makes it, with a build directory of its own below `out`.

    Raises UsageError for an unknown or repeated format.
    """
    from trtforge.pipeline.derivation import name_for
    from trtforge.pipeline.sweep import check_formats

    check_formats(formats)
    target, base = located(target), out
    if base is None and is_model(target):
        base = Path("build") / name_for(target, "none")
    elif base is None and (Path(target) / RECIPE_FILE).is_file():
        base = Path(target)
    elif base is None:
        base = choose(target, replace(choice, quant=formats[0]), overrides).out
    return {name: choose(target, replace(choice, quant=name), overrides, base / name) for name in formats}


def located(target: str) -> str:
    """`target`, or where there is no such path here, the shipped model or recipe that it names as recipes/NAME."""
    path = Path(target)
    if path.exists() or path.parts[:1] != (_SHIPPED,) or ".." in path.parts:
        return target
    shipped = asset_directory(_SHIPPED).joinpath(*path.parts[1:])
    if not shipped.exists():
        return target
    return str(shipped) if shipped.is_dir() else shipped.stem


def is_model(target: str) -> bool:
    """Whether `target` names a Hugging Face model: a directory with config.json, or a hub id that is no path here."""
    path = Path(target)
    if path.is_dir():
        return (path / "config.json").is_file()
    from trtforge.formats.hf import is_path

    return not path.exists() and not is_path(target)


def derived(target: str, choice: Choice, name: str | None = None) -> "DerivedRecipe":
    """The recipe derived for a model."""
    from trtforge.pipeline.derivation import derive

    return derive(target, choice.wish(), name=name)


def _derived(target: str, choice: Choice, overrides: tuple[str, ...], out: Path | None) -> Chosen:
    found = derived(target, choice).with_overrides(overrides)
    recipe = found.recipe()
    directory = out or Path("build") / recipe.name
    words = (operand(target), *choice.words, *(word for value in overrides for word in ("--set", value)))
    text = found.text(f"trtforge build {join((operand(directory / RECIPE_FILE), '--out', str(directory)))}", directory)
    return Chosen(recipe, words, directory, directory, text)


def _goal(name: str | None) -> "Goal | None":
    from trtforge.plan.alternatives import GOALS

    found: Mapping[str, Goal] = {goal: goal for goal in GOALS}
    if name is not None and name not in found:
        raise typer.BadParameter(f"{name} is not a goal: {', '.join(GOALS)}", param_hint="--goal")
    return None if name is None else found[name]
