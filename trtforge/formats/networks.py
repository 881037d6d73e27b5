"""Limits of TensorRT-LLM's networks, from `release_data/networks.json`.

The traits of a checkpoint are determined by plan.network_rules.
"""

from functools import cache
from pathlib import Path
from typing import Literal

from trtforge.core.config_model import Config
from trtforge.core.json_text import REINSTALL, read_json_object
from trtforge.core.recipe import QuantFormat
from trtforge.formats.releases import Release

_FILE = Path(__file__).parent / "release_data" / "networks.json"

Trait = Literal[
    "alibi", "dense_layers", "excluded_linears", "experts", "head_norm", "long_rope", "other_dense_prefix", "other_ffn",
    "quantised_final_norm", "scaled_rope", "uneven_heads", "unscaled_rope",
]  # fmt: skip
"""Properties of a checkpoint beyond its family, format and layout."""
Rule = Literal["network", "network_exclusion", "network_format", "network_release", "pipeline", "quant"]
"""The choice that avoids a limit: none, excluded layers, the format, the release or the layout."""


class Limit(Config):
    """A combination that a range of releases does not support. `families` None: any family.

    `formats` and `layout` None: any. `when`: only checkpoints with that trait. `why` and `fix` are for users. `refuses`
    False: the engine builds, with a warning. `every_backend`: conversion refuses it too.
    """

    name: str
    rule: Rule
    families: tuple[str, ...] | None
    formats: tuple[QuantFormat, ...] | None
    layout: Literal["pp"] | None
    when: Trait | None
    since: str | None
    until: str | None
    why: str
    fix: str
    sources: tuple[str, ...]
    confidence: Literal["verified", "inferred"]
    refuses: bool = True
    every_backend: bool = False

    def says(self, family: str, quant: str) -> str:
        """The reason, for a family and a format."""
        return self.why.format(family=family, format=quant)

    def concerns(self, family: str, quant: str, *, pipeline: bool, traits: frozenset[Trait]) -> bool:
        """Whether the limit applies to the combination in some release."""
        return (
            (self.families is None or family in self.families)
            and (self.formats is None or quant in self.formats)
            and (self.layout is None or pipeline)
            and (self.when is None or self.when in traits)
        )

    def covers(self, release: Release) -> bool:
        """Whether the limit applies to the release."""
        return release.within(self.since, self.until)


class Loads(Config):
    """The evidence that all other combinations load in a range of releases."""

    since: str
    until: str | None
    source: str


class Networks(Config):
    """The content of the file."""

    schema_version: int
    subject: str
    how_to_read: str
    sources: dict[str, str]
    loads: tuple[Loads, ...]
    limits: tuple[Limit, ...]

    def limits_of(
        self, family: str, quant: str, *, pipeline: bool = False, traits: frozenset[Trait] = frozenset()
    ) -> tuple[Limit, ...]:
        """The limits of a combination, each in its own releases."""
        return tuple(x for x in self.limits if x.concerns(family, quant, pipeline=pipeline, traits=traits))

    def source_of(self, release: Release) -> str:
        """The source that shows that a combination without limits loads in a release."""
        return next(known.source for known in self.loads if release.within(known.since, known.until))


@cache
def networks() -> Networks:
    """The data file."""
    return Networks.parse(read_json_object(_FILE, hint=REINSTALL), str(_FILE))
