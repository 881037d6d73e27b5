"""Reads the source of a migration: an engine's config.json, or the Triton model that serves an engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json
from trtforge.core.nearest import no_directory
from trtforge.core.plausible import require_plausible
from trtforge.formats.pbtxt import Message, read_message
from trtforge.formats.triton import CONFIG_FILE as REPOSITORY_CONFIG
from trtforge.formats.trtllm import CONFIG_FILE

_ENGINE_BACKEND, _ENGINE_PATH, _TOKENS = "tensorrtllm", "gpt_model_path", "input_ids"


@dataclass(frozen=True)
class ServingModel:
    """The model of a repository that serves the engine."""

    name: str
    parameters: Mapping[str, str]
    decoupled: bool
    max_batch_size: int
    max_queue_size: int
    instances: int


@dataclass(frozen=True)
class Settings:
    """The settings of the source. `engine`: config.json by dotted key; empty if the engine was not found.

    `missing`: the engine's path if it does not exist.
    """

    origin: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: ServingModel | None = None
    missing: str | None = None


def read_settings(source: Path, engine: Path | None = None, name: str | None = None) -> Settings:
    """The settings of `source`. `engine`: the engine's directory, if the repository's own path to it is not valid here.

    `name` selects one of several models. Raises ForgeError if `source` is neither engine nor repository, or damaged.
    """
    if not source.is_dir():
        raise no_directory(source, otherwise="Give an engine directory or a Triton model repository.")
    if (source / CONFIG_FILE).is_file():
        return Settings("engine", _engine(source))
    models = {path.parent.name: path for path in sorted(source.glob(f"*/{REPOSITORY_CONFIG}"))}
    if not models:
        raise ForgeError(
            f"{source} is neither an engine nor a model repository",
            hint=f"An engine directory holds {CONFIG_FILE}, a repository a {REPOSITORY_CONFIG} for each model.",
        )
    model, version = _serving_model(source, models, name)
    found = engine or _engine_directory(model, version)
    if found is None:
        return Settings("repository", {}, model, model.parameters.get(_ENGINE_PATH) or "-")
    return Settings("repository", _engine(found), model)


def _engine(directory: Path) -> dict[str, Any]:
    """config.json of an engine, by dotted key."""
    path = directory / CONFIG_FILE
    hint = "Give the config.json that trtllm-build wrote."
    values = read_json(path, hint=hint, absent="Give the directory that trtllm-build wrote.")
    if isinstance(values, dict):
        require_plausible(values, str(path), hint)
    if not isinstance(values, dict) or not all(
        isinstance(values.get(key), dict) for key in ("pretrained_config", "build_config")
    ):
        old = isinstance(values, dict) and "builder_config" in values
        raise ForgeError(
            f"{path} is not an engine's config.json: pretrained_config or build_config is missing",
            hint="It was written by a builder before 0.8: build the engine again, or start from the checkpoint."
            if old
            else "Give the directory that trtllm-build or `trtforge compile` wrote.",
        )
    return dict(_dotted(values, ""))


def _dotted(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _serving_model(source: Path, models: Mapping[str, Path], name: str | None) -> tuple[ServingModel, Path]:
    if name is not None and name not in models:
        raise ForgeError(f"{source} has no model {name}", hint=f"Its models are {', '.join(models)}.")
    wanted = models if name is None else {name: models[name]}
    parsed, unreadable = _parsed(wanted)
    serving = [model for model, message in parsed.items() if name is not None or _serves(message)]
    if unreadable and not serving:
        raise unreadable[0]
    if len(serving) != 1:
        what = "no model serves an engine" if not serving else f"several models serve engines: {', '.join(serving)}"
        raise ForgeError(f"{source}: {what}", hint=f"Choose one with --model: {', '.join(models)}.")
    message = parsed[serving[0]]
    policies = [p for b in message.messages("dynamic_batching") for p in b.messages("default_queue_policy")]
    transactions = message.messages("model_transaction_policy")
    groups = message.messages("instance_group")
    model = ServingModel(
        name=message.text("name", serving[0]),
        parameters=_parameters(message),
        decoupled=any(policy.flag("decoupled") for policy in transactions),
        max_batch_size=message.integer("max_batch_size"),
        max_queue_size=policies[-1].integer("max_queue_size") if policies else 0,
        instances=sum(group.integer("count", 1) for group in groups) if groups else 1,
    )
    return model, _version(models[serving[0]].parent, message)


def _parsed(paths: Mapping[str, Path]) -> tuple[dict[str, Message], list[ForgeError]]:
    """The models whose config.pbtxt can be read, and the errors of others, such as unfilled templates."""
    parsed, unreadable = {}, []
    for model, path in paths.items():
        try:
            parsed[model] = read_message(path)
        except ForgeError as error:
            unreadable.append(error)
    return parsed, unreadable


def _serves(message: Message) -> bool:
    """Whether a model runs an engine, with the backend of TensorRT-LLM or in Python.

    The preprocessing of NVIDIA's repositories has the engine's path too, but takes text.
    """
    takes_tokens = any(tensor.text("name") == _TOKENS for tensor in message.messages("input"))
    return message.text("backend") == _ENGINE_BACKEND or (_ENGINE_PATH in _parameters(message) and takes_tokens)


def _version(model: Path, message: Message) -> Path:
    """The directory of the version that Triton serves: the newest, or the newest that version_policy names."""
    specific = [names for policy in message.messages("version_policy") for names in policy.messages("specific")]
    named = {str(version) for names in specific for version in names.fields.get("versions", ())}
    versions = [path for path in model.iterdir() if path.name.isdecimal() and (not named or path.name in named)]
    return max(versions, key=lambda path: int(path.name), default=model / "1")


def _parameters(message: Message) -> dict[str, str]:
    return {
        entry.text("key"): value.text("string_value")
        for entry in message.messages("parameters")
        for value in entry.messages("value")
    }


def _engine_directory(model: ServingModel, version: Path) -> Path | None:
    """The engine's directory: gpt_model_path (if relative, to `version`), or inside `version`; None if not found."""
    path = Path(model.parameters.get(_ENGINE_PATH) or version.name)
    for directory in (path if path.is_absolute() else version / path, version / path.name, version):
        if (directory / CONFIG_FILE).is_file():
            return directory
    return None
