"""Linear layers that a quantised checkpoint leaves as they are: which ones patterns name, and how config.json says it.

Users name them as Hugging Face does, layers counted through the whole model. TensorRT-LLM has names of its own, counted
anew in each pipeline stage, in `quantization.exclude_modules`.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.formats.quantized_source import QuantizedSource
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.family import Facts, Family, Linear

_NEVER_QUANTIZED = ("lm_head",)
_SHOWN = 3


def excluded_modules(family: Family, facts: Facts, patterns: tuple[str, ...]) -> frozenset[str]:
    """The linear layers, by full Hugging Face name, that `patterns` (* and ? as in file names) take.

    Raises ForgeError for a pattern without a layer, for experts, and for a layer without those that TensorRT-LLM
    quantises by one scale with it.
    """
    if not patterns:
        return frozenset()
    groups = tuple(inseparable(family, facts))
    experts = tuple(_experts(family, facts))
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in experts):
            raise ForgeError(
                f"exclude_modules: {pattern} takes experts, which are quantised all or not at all",
                hint="Exclude attention or dense layers, or use --quant none.",
            )
        names = (*_NEVER_QUANTIZED, *(name for group in groups for name in group))
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ForgeError(
                f"exclude_modules: {pattern} is no linear layer of this model",
                hint=f"Names look like {', '.join(names[1 : 1 + _SHOWN])}; * stands for anything.",
            )
    return frozenset(name for group in groups for name in _taken(group, patterns))


def inseparable(family: Family, facts: Facts) -> Iterator[tuple[str, ...]]:
    """The linear layers of the model in order, those together that one matrix, or one scale, serves."""
    for layer in range(facts.sizes.num_layers):
        groups: dict[str, list[str]] = {}
        for row in family.linears:
            if facts.holds(row.when, layer):
                groups.setdefault(row.shares_scale or row.target, []).extend(_modules(family, row, layer))
        yield from (tuple(dict.fromkeys(group)) for group in groups.values())


def exclude_names(
    family: Family, facts: Facts, parallel: Parallel, excluded: Callable[[str], bool], *, who: str, hint: str
) -> tuple[str, ...]:
    """TensorRT-LLM's names of the linear layers all of whose modules are `excluded`.

    Raises ForgeError, that `who` did it, where pipeline stages differ in them: config.json has one list for all.
    """
    found = {tuple(_names_in_stage(family, facts, parallel, excluded, stage)) for stage in range(parallel.pp)}
    if len(found) > 1:
        raise ForgeError(
            f"{who} other layers unquantised in one pipeline stage of {parallel.pp} than in another: "
            "TensorRT-LLM numbers layers anew in each stage and has one list of exceptions",
            hint=hint,
        )
    return found.pop()


def modules_excluded_by(config: CheckpointConfig, family: Family, facts: Facts) -> tuple[str, ...]:
    """The other way round: the Hugging Face names of the linear layers that a checkpoint's config.json excludes."""
    patterns = config.quantization.exclude_modules or ()
    return tuple(
        module
        for stage in range(config.parallel.pp)
        for layer, name, row in _rows(family, facts, config.parallel, stage)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        for module in _modules(family, row, layer)
    )


def unquantized_rows(family: Family, facts: Facts, excluded: Callable[[str], bool]) -> tuple[frozenset[str], ...]:
    """For each layer of the model its linear layers, as checkpoints name them, all of whose modules are `excluded`."""
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
    """The linear layers, as checkpoints name them, that no layer of the model has quantised.

    Raises ForgeError as `excluded_modules` does.
    """
    excluded: Callable[[str], bool] = excluded_modules(family, facts, patterns).__contains__
    if source is not None:
        excluded = partial(_leaves, source)
    elif not patterns:
        return frozenset()
    left = unquantized_rows(family, facts, excluded)
    return frozenset(
        row.target
        for row in family.linears
        if all(row.target in names for layer, names in enumerate(left) if facts.holds(row.when, layer))
    )


def _leaves(source: QuantizedSource, module: str) -> bool:
    return not source.quantizes(module)


def _names_in_stage(
    family: Family, facts: Facts, parallel: Parallel, excluded: Callable[[str], bool], stage: int
) -> Iterator[str]:
    for layer, name, row in _rows(family, facts, parallel, stage):
        if all(excluded(module) for module in _modules(family, row, layer)):
            yield name


def _rows(family: Family, facts: Facts, parallel: Parallel, stage: int) -> Iterator[tuple[int, str, Linear]]:
    """Every quantisable row of a stage with its layer's number in the model and its name in the rank file."""
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


def _taken(group: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """All of a group or none of it."""
    taken = [name for name in group if any(fnmatchcase(name, pattern) for pattern in patterns)]
    left = [name for name in group if name not in taken]
    if taken and left:
        raise ForgeError(
            f"exclude_modules: {taken[0]} is excluded and {left[0]} is not: TensorRT-LLM has one scale for both",
            hint=f"Exclude {', '.join(group)}, or none of them.",
        )
    return group if taken else ()
