"""tune.json: the measurements, their machine, and the recommendation."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trtforge import __version__
from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.replace import replace_text
from trtforge.core.serving import ServingConfig
from trtforge.package.config import PackageConfig
from trtforge.serve.speed import Load
from trtforge.tune.choice import Comparison
from trtforge.tune.goal import Goal, Point
from trtforge.tune.variants import Variant

NO_TIME = "not enough time was left"
"""Reason why a variant was not measured, or not completely."""


class Trial(Config):
    """A variant and its measured loads. `comparison`: its repetitions, unless it was clearly worse.

    `untried`: why nothing was measured or measuring ended early; empty otherwise. `failed`: why its server failed in a
    repetition; it is then not repeated again, and if it served the present settings, repetitions end.
    """

    variant: Variant
    points: tuple[Point, ...] = ()
    comparison: Comparison | None = None
    untried: str = ""
    failed: str = ""


class Tuning(Config):
    """The result of a run. The first trial is of the present settings.

    `recommended`: the better changes, empty to keep the present settings; `highest_load`: the highest load that keeps
    the limits with them, None without limits or if no measured load does. `repository`: digest of the tuned repository;
    `busy`: mean number of processors in use before.
    """

    goal: Goal
    load: Load
    present: ServingConfig
    trials: tuple[Trial, ...]
    recommended: Variant
    highest_load: Point | None
    seconds: float
    repository: str
    machine: str
    busy: float | None
    trtforge: str = __version__
    measured: str

    @property
    def settings(self) -> ServingConfig:
        """The recommended serving settings."""
        return self.recommended.applied(self.present)


def now() -> str:
    """The present time in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def set_options(serving: ServingConfig) -> list[str]:
    """The arguments of `trtforge package` for the settings that are set."""
    changed = serving.model_dump(mode="json", exclude_unset=True)
    return [word for key, value in changed.items() for word in ("--set", f"serving.{key}={_yaml(value)}")]


def package_options(config: PackageConfig) -> list[str]:
    """The other options of `trtforge package`, as far as they are known from the settings."""
    target = config.target
    values = {"--name": config.name_prefix, "--target-version": target.tensorrt_llm, "--gpu": target.gpu}
    words = [word for option, value in values.items() if value for word in (option, value)]
    if config.features is not None:  # at least one, so that they are not read from the engine
        given = {"kv_reuse": config.features.kv_reuse} | config.features.model_dump(mode="json", exclude_defaults=True)
        words += [word for key, value in given.items() for word in ("--feature", f"{key}={json.dumps(value)}")]
    return words


def recipe_lines(variant: Variant) -> list[str]:
    """The changed settings as lines of a recipe."""
    return ["serving:", *(f"  {key}: {_yaml(value)}" for key, value in variant.changes.items())]


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_yaml, value))}]" if isinstance(value, list | tuple) else str(value)


def keep(tuning: Tuning, path: Path) -> Path:
    """Write the result. Raises ForgeError."""
    try:
        replace_text(path, tuning.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}", hint="Make the build directory writable.") from None
    return path
