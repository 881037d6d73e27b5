"""What each TensorRT-LLM release with the engine backend accepts, and the containers that contain it.

All facts are in `release_data/*.json`, where each entry has a range of releases and a confidence; no code compares
versions to decide on features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from packaging.version import InvalidVersion, Version
from pydantic import AliasChoices, BaseModel, ConfigDict, JsonValue
from pydantic import Field as Parsed

from trtforge.core.errors import ForgeError
from trtforge.core.json_text import REINSTALL, read_json_object

Confidence = Literal["verified", "secondary", "inferred"]
CONFIDENCES: tuple[Confidence, ...] = ("verified", "secondary", "inferred")
"""Best first: seen in that release's source; listed by a third party's survey of it; inferred from other releases."""

Section = Literal[
    "build_config",
    "plugin_config",
    "lora_config",
    "mapping",
    "quantization",
    "moe",
    "quant_algo",
    "kv_cache_quant_algo",
    "speculative_decoding_mode",
    "architectures",
]
"""The tables of build-config.json; the last four list values, the others keys of a JSON object."""

_REGISTRY = "nvcr.io/nvidia"


@dataclass(frozen=True)
class Field:
    """A key (or listed value) in one release. `choices` None: no complete list of values is known.

    `default_known` is false if this release's default is unknown; the key should then be left out of files. `flag` is
    the `trtllm-build` option that sets it; `value` the number of an enumeration's member.
    """

    name: str
    type: str
    default: JsonValue
    default_known: bool
    choices: tuple[JsonValue, ...] | None
    confidence: Confidence
    flag: str | None
    value: JsonValue
    note: str


@dataclass(frozen=True)
class Gone:
    """A key of an earlier release that this one no longer has. `last` is the last release with it."""

    name: str
    last: str
    renamed_to: str | None


@dataclass(frozen=True)
class Problem:
    """A key or value that a release does not accept, according to the data."""

    message: str
    hint: str
    confidence: Confidence

    @property
    def refuses(self) -> bool:
        """Whether it is an error, known from the release's source or a survey of it. Inferred problems are only
        warnings."""
        return self.confidence != "inferred"


class _Raw(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Container(_Raw):
    """A Triton image and its versions. `confidence` is medium if sources contradict each other (see `note`)."""

    triton: str
    image_tag: str
    tensorrt_llm: str
    tensorrt: str
    cuda: str
    min_driver: str
    python: str
    modelopt: str | None = None
    confidence: Literal["high", "medium"]
    note: str = ""

    @property
    def image(self) -> str:
        """The image's name for `docker run`."""
        return f"{_REGISTRY}/tritonserver:{self.image_tag}"


class _Change(_Raw):
    versions: tuple[str, ...]
    default: JsonValue = None


class _Entry(_Raw):
    name: str = Parsed(validation_alias=AliasChoices("name", "key", "quant_algo", "architecture", "flag", "value"))
    type: str = "str"
    default: JsonValue = None
    allowed: tuple[JsonValue, ...] | None = None
    since: str
    until: str | None = None
    cli: str | None = None
    value: JsonValue = None
    changes: tuple[_Change, ...] = ()
    evidence: Mapping[str, JsonValue] = Parsed(default_factory=dict)
    renamed_to: str | None = None
    note: str = ""

    def field(self, line: str) -> Field:
        """The entry for release `line`."""
        changed = [change for change in self.changes if "default" in change.model_fields_set]
        defaults = [change.default for change in changed if line in change.versions]
        return Field(
            name=self.name,
            type=self.type,
            default=defaults[0] if defaults else self.default,
            default_known=bool(defaults) if changed else "default" in self.model_fields_set,
            choices=self.allowed,
            confidence=self._confidence(line),
            flag=self.cli,
            value=self.value,
            note=self.note,
        )

    def _confidence(self, line: str) -> Confidence:
        for mark in CONFIDENCES:
            releases = self.evidence.get(mark)
            if isinstance(releases, list) and line in releases:
                return mark
        return "inferred"


class _Line(_Raw):
    id: str
    also: tuple[str, ...] = ()

    def covers(self, version: str) -> bool:
        """Whether `version` is this line; an id such as 1.0.x stands for every patch release."""
        return any(
            version == name or (name.endswith(".x") and version.startswith(name.removesuffix("x")))
            for name in (self.id, *self.also)
        )

    @property
    def newest(self) -> str:
        """The release that the first two numbers alone mean."""
        return self.also[-1] if self.id.endswith(".x") else self.id

    @property
    def minor(self) -> str:
        """Its first two numbers."""
        return self.id.rpartition(".")[0]


@dataclass(frozen=True)
class Release:
    """One TensorRT-LLM release. `line` is the data entry that covers it, `order` the position of that entry."""

    version: str
    line: str
    order: int

    def within(self, since: str | None, until: str | None) -> bool:
        """Whether this release is in a range, both ends inclusive; None: open."""
        return (since is None or release(since).order <= self.order) and (
            until is None or self.order <= release(until).order
        )

    def fields(self, section: Section) -> Mapping[str, Field]:
        """The keys (or values) that this release has, by name, in the data's order."""
        return _fields(self, section)

    def field(self, section: Section, name: str) -> Field:
        """One key of this release. Raises KeyError for any other."""
        return self.fields(section)[name]

    def flags(self) -> Mapping[str, Field]:
        """The `trtllm-build` options of this release, those that set plugin fields included."""
        return _flags(self)

    def gone(self, section: Section) -> tuple[Gone, ...]:
        """The keys that earlier releases had and this one lacks."""
        return tuple(
            Gone(entry.name, entry.until, entry.renamed_to)
            for entry in _entries(section)
            if entry.until is not None and not self.within(None, entry.until)
        )

    def key_problem(self, section: Section, name: str) -> Problem | None:
        """Why this release lacks a key (or value), or None; its confidence is that of the table's best entry."""
        known = self.fields(section)
        if name in known:
            return None
        for gone in self.gone(section):
            if gone.name == name:
                hint = f"Use {gone.renamed_to}." if gone.renamed_to else "Leave it out."
                return self._problem(section, f"{section}: {name} was removed after {gone.last}", hint)
        for entry in _entries(section):
            if entry.name == name:
                return self._problem(section, f"{section}: {name} was added in {entry.since}", f"Target {entry.since}.")
        return self._problem(section, f"{section}: {name} is not known", f"Known: {', '.join(known)}.")

    def value_problem(self, field: Field, value: JsonValue) -> Problem | None:
        """Why this release does not accept `value` for one of its fields or flags, or None."""
        if field.choices is None or value in field.choices:
            return None
        choices = ", ".join("none" if choice is None else str(choice) for choice in field.choices)
        return Problem(
            f"TensorRT-LLM {self.version}: {field.name} cannot be {value}", f"It takes {choices}.", field.confidence
        )

    def _problem(self, section: Section, message: str, hint: str) -> Problem:
        marks = {field.confidence for field in self.fields(section).values()}
        surest: Confidence = min(marks, key=CONFIDENCES.index, default="inferred")
        return Problem(f"TensorRT-LLM {self.version}: {message}", hint, surest)


@cache
def release(version: str) -> Release:
    """The release `version`; two numbers (0.20) mean the newest release of that line. Raises ForgeError for an unknown
    one."""
    lines = _lines()
    for order, line in enumerate(lines):
        if line.covers(version) or version == line.minor:
            return Release(line.newest if version == line.minor else version, line.id, order)
    last = _last_engine_release()
    if _is_later(version, last):
        raise ForgeError(
            f"TensorRT-LLM {version} has no TensorRT engines: the engine backend ends with {last}",
            hint=f"Target {last}, or serve the Hugging Face checkpoint with TensorRT-LLM's LLM API (llmapi).",
        )
    known = ", ".join(line.id for line in lines)
    raise ForgeError(f"TensorRT-LLM {version} is not a known release", hint=f"Known releases: {known}.")


def follows_engines(version: str) -> bool:
    """Whether a version is later than the last release with engines."""
    return _is_later(version, _last_engine_release())


@cache
def engine_releases() -> tuple[Release, ...]:
    """The newest release of every line with the engine backend, the oldest first."""
    return tuple(release(line.newest) for line in _lines())


@cache
def known_containers() -> tuple[Container, ...]:
    """All containers, the newest first."""
    return tuple(Container.model_validate(entry) for entry in read_release_data("containers")["containers"])


def containers_of(wanted: Release) -> tuple[Container, ...]:
    """The containers with that release, sorted: those whose sources agree first, then the newest.

    An engine runs only with the version that built it, so another patch release counts only if none matches.
    """
    containers = known_containers()
    exact = [container for container in containers if container.tensorrt_llm == wanted.version]
    same_line = [container for container in containers if _covers(wanted.line, container.tensorrt_llm)]
    return tuple(sorted(exact or same_line, key=lambda container: container.confidence != "high"))


def containers_with(version: str) -> tuple[Container, ...]:
    """The containers with exactly this release, which may be one without engines."""
    return tuple(container for container in known_containers() if container.tensorrt_llm == version)


def release_image(version: str) -> str:
    """TensorRT-LLM's own image of a release, which has trtllm-serve and no Triton."""
    return f"{_REGISTRY}/{read_release_data('containers')['release_image']['name']}:{version}"


@cache
def read_release_data(
    name: Literal["build-config", "containers", "triton-model-config", "llmapi", "kv-windows"],
) -> Mapping[str, Any]:
    """The content of a data file."""
    path = Path(__file__).parent / "release_data" / f"{name}.json"
    return MappingProxyType(read_json_object(path, hint=REINSTALL))


@cache
def _lines() -> tuple[_Line, ...]:
    return tuple(_Line.model_validate(line) for line in read_release_data("build-config")["versions"])


@cache
def _entries(section: Section) -> tuple[_Entry, ...]:
    return tuple(_Entry.model_validate(entry) for entry in read_release_data("build-config")[section])


@cache
def _fields(wanted: Release, section: Section) -> Mapping[str, Field]:
    entries = (entry for entry in _entries(section) if wanted.within(entry.since, entry.until))
    return MappingProxyType({entry.name: entry.field(wanted.line) for entry in entries})


@cache
def _flags(wanted: Release) -> Mapping[str, Field]:
    entries = [_Entry.model_validate(flag) for flag in read_release_data("build-config")["cli"]["flags"]]
    flags = {entry.name: entry.field(wanted.line) for entry in entries if wanted.within(entry.since, entry.until)}
    plugins = {field.flag: field for field in wanted.fields("plugin_config").values() if field.flag is not None}
    return MappingProxyType(flags | plugins)


def _last_engine_release() -> str:
    return str(read_release_data("containers")["last_engine_release"]["tensorrt_llm"])


def _covers(line: str, version: str) -> bool:
    return any(entry.id == line and entry.covers(version) for entry in _lines())


def _is_later(version: str, last: str) -> bool:
    """Whether `version` is of a later release than `last`; False if it is not a version.

    A local build or post-release (1.2.1+cu130, 1.2.1.post1) counts as the same release.
    """
    try:
        return Version(version).release > Version(last).release
    except InvalidVersion:
        return False
