"""Whether TensorRT-LLM builds an engine for a family, format and layout in a release, with reason and source.

docs/formats.md shows these verdicts as a table. Sizes, GPUs and features are judged by plan.engine_rules.
"""

from dataclasses import dataclass

from trtforge.core.recipe import QuantFormat
from trtforge.formats.networks import Trait, networks
from trtforge.formats.releases import Release
from trtforge.models.family import Family
from trtforge.models.formats import FORMATS

BUILD_CONFIG = "release_data/build-config.json"


@dataclass(frozen=True)
class Verdict:
    """`why`: empty if `loads`. `sources`: names in `networks.json`, or a data file."""

    loads: bool
    why: str
    sources: tuple[str, ...]


def verdict(
    family: Family,
    architecture: str,
    quant: QuantFormat,
    release: Release,
    *,
    pipeline: bool = False,
    traits: frozenset[Trait] = frozenset(),
) -> Verdict:
    """The verdict for a TensorRT-LLM architecture of a family."""
    algorithm = FORMATS[quant].algorithm
    for problem in (
        release.key_problem("architectures", architecture),
        release.key_problem("quant_algo", algorithm) if algorithm is not None else None,
    ):
        if problem is not None:
            return Verdict(False, problem.message, (BUILD_CONFIG,))
    for limit in networks().limits_of(family.name, quant, pipeline=pipeline, traits=traits):
        if limit.refuses and limit.covers(release):
            return Verdict(False, limit.says(family.name, quant), limit.sources)
    return Verdict(True, "", (networks().source_of(release),))
