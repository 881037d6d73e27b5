"""The tables of docs/formats.md that say what TensorRT-LLM's networks take."""

from tests.plan.verdicts import verdict
from trtforge.core.recipe import QuantFormat
from trtforge.formats.networks import Trait, networks
from trtforge.formats.releases import engine_releases
from trtforge.models.formats import FORMATS
from trtforge.models.registry import architectures, family_of

EXPERTS: frozenset[Trait] = frozenset({"experts"})
TRAITS: dict[str, frozenset[Trait]] = {
    "BloomForCausalLM": frozenset({"alibi"}),
    "DeepseekV2ForCausalLM": EXPERTS | {"scaled_rope"},
    "MixtralForCausalLM": EXPERTS,
    "Qwen2MoeForCausalLM": EXPERTS,
    "Qwen3MoeForCausalLM": EXPERTS,
}
"""What every model of an architecture has."""

VARIANTS: tuple[tuple[str, str, frozenset[Trait]], ...] = (
    *((name, "", TRAITS.get(name, frozenset())) for name in architectures() if name != "RWForCausalLM"),
    ("CohereForCausalLM", "use_qk_norm", frozenset({"head_norm"})),
    ("FalconForCausalLM", "alibi", frozenset({"alibi"})),
    ("Phi3ForCausalLM", "LongRoPE", frozenset({"long_rope"})),
    ("Qwen2MoeForCausalLM", "dense layers", frozenset({"experts", "dense_layers"})),
)
"""Architectures, and their models with a trait that decides what TensorRT-LLM takes."""


def families() -> str:
    rows = [
        "| Hugging Face architecture | family | TensorRT-LLM architecture | engines | TP | PP | EP |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in architectures():
        family, traits = family_of(name), TRAITS.get(name, frozenset())
        target = family.architectures[name]
        engines, pipelines = (in_releases(name, "none", traits, pipeline=pp) for pp in (False, True))
        experts = "yes" if family.experts else "–"
        pp = "yes" if pipelines == engines else pipelines
        rows.append(f"| {name} | {family.name} | {target} | {engines} | yes | {pp} | {experts} |")
    return "\n".join(rows)


def in_releases(name: str, quant: QuantFormat, traits: frozenset[Trait], *, pipeline: bool = False) -> str:
    """The releases whose networks take the combination, such as `0.19.0 on` or `to 0.18.x`."""
    family, lines = family_of(name), engine_releases()
    taken = [
        each.line
        for each in lines
        if verdict(family, family.architectures[name], quant, each, pipeline=pipeline, traits=traits).loads
    ]
    if not taken:
        return "–"
    first, last = lines[0].line, lines[-1].line
    if taken[-1] == last:
        return f"{taken[0]} on"
    return f"to {taken[-1]}" if taken[0] == first else f"{taken[0]} to {taken[-1]}"


def engine_formats() -> str:
    """Which releases build engines of each family in each format; `all` where they build engines of it at all."""
    names = list(FORMATS)
    rows = [f"| family | {' | '.join(f'`{name}`' for name in names)} |", "|---|" + "---|" * len(names)]
    for name, what, traits in VARIANTS:
        if not family_of(name).engines:
            continue
        engines = in_releases(name, "none", TRAITS.get(name, frozenset()))
        cells = [in_releases(name, quant, traits) for quant in names]
        label = family_of(name).name + (f" ({what})" if what else "")
        rows.append(f"| {label} | {' | '.join('all' if cell == engines else cell for cell in cells)} |")
    return "\n".join(rows)


WHEN: dict[Trait | None, str] = {
    None: "",
    "alibi": " with ALiBi",
    "dense_layers": " with dense layers",
    "excluded_linears": " with `exclude_modules`",
    "experts": "",
    "head_norm": " with `use_qk_norm`",
    "long_rope": " with LongRoPE",
    "other_dense_prefix": " with another number of dense layers",
    "other_ffn": " with another FFN",
    "quantised_final_norm": " of earlier conversions",
    "scaled_rope": " with `rope_scaling`",
    "uneven_heads": " with other head sizes",
    "unscaled_rope": " without yarn",
}


def network_limits() -> str:
    """The limits, with their sources."""
    rows = ["| families | formats, layout | releases | reason | source |", "|---|---|---|---|---|"]
    for limit in networks().limits:
        what = [f"`{name}`" for name in limit.formats or ()] + (["pp"] if limit.layout else [])
        ends = {(True, True): "all", (False, True): f"{limit.since} on", (True, False): f"to {limit.until}"}
        releases = ends.get((limit.since is None, limit.until is None), f"{limit.since} to {limit.until}")
        why = limit.why.replace(" ({family})", "").replace("the {family}", "the").replace("{family}", "the family")
        why = why.replace("{format}", "the format")
        mark = "" if limit.refuses else " (a warning)"
        who = ", ".join(limit.families or ("all",)) + WHEN[limit.when]
        which = ", ".join(what) or "all"
        rows.append(f"| {who} | {which} | {releases} | {why}{mark} | {', '.join(limit.sources)} |")
    return "\n".join(rows)


def network_sources() -> str:
    return "\n".join(f"- {name}: {text}" for name, text in networks().sources.items())
