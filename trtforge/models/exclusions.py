"""Linear layers excluded from quantisation: those that match the user's patterns, and their names in config.json.

Users give Hugging Face names, whose layer numbers count through the whole model. `quantization.exclude_modules` in
config.json has TensorRT-LLM's names, whose layer numbers start at 0 in each pipeline stage.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import QuantFormat
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.family import Facts, Family, Linear

_NEVER_QUANTIZED = ("lm_head",)
_SHOWN = 3


def excluded_modules(family: Family, facts: Facts, patterns: tuple[str, ...]) -> frozenset[str]:
    """The full Hugging Face names of the linear layers that match `patterns` (* and ? as in file names).

    Raises ForgeError for a pattern that matches experts or no layer, and for a match of some but not all of the layers
    that share one scale in TensorRT-LLM.
    """
    if not patterns:
        return frozenset()
    groups = tuple(inseparable(family, facts))
    experts = tuple(_experts(family, facts))
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in experts):
            raise ForgeError(
                f"exclude_modules: {pattern} matches experts, which cannot be excluded",
                hint="Exclude attention or dense layers, or use --quant none.",
            )
        names = (*_NEVER_QUANTIZED, *(name for group in groups for name in group))
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ForgeError(
                f"exclude_modules: {pattern} matches no linear layer of this model",
                hint=f"Names look like {', '.join(names[1 : 1 + _SHOWN])}; * matches anything.",
            )
    return frozenset(name for group in groups for name in _matched(group, patterns))


def inseparable(family: Family, facts: Facts) -> Iterator[tuple[str, ...]]:
    """The model's linear layers in order, grouped if they share a matrix or a scale in TensorRT-LLM."""
    for layer in range(facts.sizes.num_layers):
        groups: dict[str, list[str]] = {}
        for row in family.linears:
            if facts.holds(row.when, layer):
                groups.setdefault(row.shares_scale or row.target, []).extend(_modules(family, row, layer))
        yield from (tuple(dict.fromkeys(group)) for group in groups.values())


def exclude_names(
    family: Family, facts: Facts, parallel: Parallel, excluded: Callable[[str], bool], *, who: str, hint: str
) -> tuple[str, ...]:
    """TensorRT-LLM's names of the linear layers whose modules are all `excluded`.

    Raises ForgeError if pipeline stages differ, as config.json has one list for all; `who` starts its message.
    """
    found = {tuple(_names_in_stage(family, facts, parallel, excluded, stage)) for stage in range(parallel.pp)}
    if len(found) > 1:
        raise ForgeError(
            f"{who} different layers unquantised in the {parallel.pp} pipeline stages: "
            "TensorRT-LLM numbers layers from 0 in each stage and has one exclude_modules list for all",
            hint=hint,
        )
    return found.pop()


def linear_names(family: Family, facts: Facts) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every linear layer of a model in one pipeline stage: its name in the rank file, its Hugging Face modules."""
    for layer, name, row in linear_rows(family, facts, Parallel(), 0):
        yield name, tuple(_modules(family, row, layer))


def modules_excluded_by(config: CheckpointConfig, family: Family, facts: Facts) -> tuple[str, ...]:
    """The Hugging Face names of the linear layers that a checkpoint's config.json excludes."""
    patterns = config.quantization.exclude_modules or ()
    return tuple(
        module
        for stage in range(config.parallel.pp)
        for layer, name, row in linear_rows(family, facts, config.parallel, stage)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        for module in _modules(family, row, layer)
    )


def unquantized_rows(family: Family, facts: Facts, excluded: Callable[[str], bool]) -> tuple[frozenset[str], ...]:
    """For each decoder layer, TensorRT-LLM's names of the linear layers whose modules are all `excluded`."""
    return tuple(
        frozenset(
            row.target
            for row in family.linears
            if facts.holds(row.when, layer) and all(excluded(module) for module in _modules(family, row, layer))
        )
        for layer in range(facts.sizes.num_layers)
    )


def rows_left(
    family: Family, facts: Facts, patterns: tuple[str, ...], source: QuantizedSource | None
) -> frozenset[str]:
    """TensorRT-LLM's names of the linear layers that are quantised in no decoder layer; for a mixed-precision source,
    those that have its first format in no layer.

    Raises ForgeError as `excluded_modules` does.
    """
    excluded: Callable[[str], bool] = excluded_modules(family, facts, patterns).__contains__
    if source is not None:
        excluded = partial(_has_another_format, source)
    elif not patterns:
        return frozenset()
    left = unquantized_rows(family, facts, excluded)
    return frozenset(
        row.target
        for row in family.linears
        if all(row.target in names for layer, names in enumerate(left) if facts.holds(row.when, layer))
    )


def _has_another_format(source: QuantizedSource, module: str) -> bool:
    found = source.of(module)
    return found is None or found.format != source.format


def formats_in_source(source: QuantizedSource, family: Family, facts: Facts) -> Iterator[tuple[int, str, QuantFormat]]:
    """The format of every linear layer of a quantised source, after its decoder layer's number and its name there."""
    for layer, _, row in linear_rows(family, facts, Parallel(), 0):
        found = source.of(_modules(family, row, layer)[0])
        yield layer, row.target, "none" if found is None else found.format


def _names_in_stage(
    family: Family, facts: Facts, parallel: Parallel, excluded: Callable[[str], bool], stage: int
) -> Iterator[str]:
    for layer, name, row in linear_rows(family, facts, parallel, stage):
        if all(excluded(module) for module in _modules(family, row, layer)):
            yield name


def linear_rows(family: Family, facts: Facts, parallel: Parallel, stage: int) -> Iterator[tuple[int, str, Linear]]:
    """Every quantisable row of a stage, after its layer's number in the model and its name in the rank file."""
    for local, layer in enumerate(parallel.layers_of(stage, facts.sizes.num_layers)):
        for row in family.linears:
            if facts.holds(row.when, layer):
                yield layer, f"transformer.layers.{local}.{row.target}", row


def _modules(family: Family, row: Linear, layer: int) -> list[str]:
    return [f"{family.layer_prefix}.{layer}.{part.module}" for part in row.parts]


def _experts(family: Family, facts: Facts) -> Iterator[str]:
    for layer in sorted(facts.sparse_layers):
        for row in family.experts:
            for expert in range(facts.sizes.of("experts")):
                yield from (f"{family.layer_prefix}.{layer}.{part.module.format(expert)}" for part in row.parts)


def _matched(group: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The group if the patterns match all of it, () if they match none. Raises ForgeError if they match a part."""
    matched = [name for name in group if any(fnmatchcase(name, pattern) for pattern in patterns)]
    left = [name for name in group if name not in matched]
    if matched and left:
        raise ForgeError(
            f"exclude_modules: {matched[0]} is excluded and {left[0]} is not: TensorRT-LLM has one scale for both",
            hint=f"Exclude {', '.join(group)}, or none of them.",
        )
    return group if matched else ()
