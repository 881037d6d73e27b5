"""Whether TensorRT-LLM's network of a checkpoint's family supports its format and layout, by formats.networks."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from trtforge.formats.networks import Limit, Trait, networks
from trtforge.formats.releases import Release, engine_releases
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, CheckpointConfig
from trtforge.models.checkpoint_config import ALWAYS_EXCLUDED
from trtforge.models.checkpoint_sizes import has_dense_layers
from trtforge.models.family import Family
from trtforge.models.registry import family_of_engine
from trtforge.plan.formats import BY_ALGORITHM
from trtforge.plan.legality import Problem


def network_problems(checkpoint: CheckpointConfig, release: Release, *, converted: bool = True) -> Iterator[Problem]:
    """The limits of the release's network; none for a family that trtforge does not know.

    `converted` False: without those that conversion refuses (plan.legality).
    """
    for limit, family in _limits(checkpoint):
        if limit.covers(release) and (converted or not limit.every_backend):
            yield _problem(limit, family, checkpoint, f"TensorRT-LLM {release.version}: ")


def unbuildable(checkpoint: CheckpointConfig) -> Problem | None:
    """Why no release builds an engine of the checkpoint; None if one does. Sizes are judged by plan.engine_rules."""
    limits = tuple((limit, family) for limit, family in _limits(checkpoint) if limit.refuses)
    known = [each for each in engine_releases() if each.key_problem("architectures", checkpoint.architecture) is None]
    if any(not any(limit.covers(release) for limit, _ in limits) for release in known):
        return None
    return next((_problem(limit, family, checkpoint, "") for limit, family in limits), None)


def excluded_rows(checkpoint: CheckpointConfig, family: Family) -> frozenset[str]:
    """TensorRT-LLM's names of the linear layers that config.json leaves unquantised in some decoder layer."""
    return frozenset(name for name, layers in _excluded(checkpoint, family).items() if layers)


def unquantised_rows(checkpoint: CheckpointConfig, family: Family) -> frozenset[str]:
    """TensorRT-LLM's names of the linear layers that config.json leaves unquantised in every decoder layer."""
    layers = _layers(checkpoint)
    return frozenset(name for name, left in _excluded(checkpoint, family).items() if left == layers)


def _excluded(checkpoint: CheckpointConfig, family: Family) -> Mapping[str, int]:
    """For each linear layer that may be quantised, the number of decoder layers in which it is not."""
    patterns = checkpoint.quantization.exclude_modules or ()
    own = tuple(p for p in patterns if p not in UNQUANTIZED_MODULES and p not in ALWAYS_EXCLUDED)
    return _matched(own, tuple(row.target for row in family.linears), _layers(checkpoint))


@lru_cache(maxsize=32)
def _matched(patterns: tuple[str, ...], names: tuple[str, ...], layers: int) -> Mapping[str, int]:
    """For each name, the number of decoder layers in which a pattern matches it; cached, as planning calls it often."""
    if not patterns:
        return {}
    return {
        name: sum(
            any(fnmatchcase(f"transformer.layers.{layer}.{name}", pattern) for pattern in patterns)
            for layer in range(layers)
        )
        for name in names
    }


def _layers(checkpoint: CheckpointConfig) -> int:
    """Decoder layers of a pipeline stage."""
    return checkpoint.num_hidden_layers // checkpoint.parallel.pp


def _limits(checkpoint: CheckpointConfig) -> Iterator[tuple[Limit, Family]]:
    family = family_of_engine(checkpoint.base_architecture)
    format = BY_ALGORITHM.get(checkpoint.quantization.quant_algo)
    if family is None or format is None:
        return
    pipeline, traits = checkpoint.parallel.pp > 1, traits_of(checkpoint, family)
    for limit in networks().limits_of(family.name, format.name, pipeline=pipeline, traits=traits):
        yield limit, family


def _problem(limit: Limit, family: Family, checkpoint: CheckpointConfig, who: str) -> Problem:
    format = BY_ALGORITHM[checkpoint.quantization.quant_algo]
    return Problem(limit.rule, who + limit.says(family.name, format.name), limit.fix, limit.refuses)


def traits_of(checkpoint: CheckpointConfig, family: Family) -> frozenset[Trait]:
    """The properties of a checkpoint on which limits may depend, besides family, format and layout."""
    return frozenset(_traits(checkpoint, family))


def _traits(checkpoint: CheckpointConfig, family: Family) -> Iterator[Trait]:
    more = checkpoint.model_extra or {}
    if checkpoint.position_embedding_type.startswith("alibi"):
        yield "alibi"
    if checkpoint.position_embedding_type == "long_rope":
        yield "long_rope"
    if checkpoint.qk_layernorm:
        yield "head_norm"
    if checkpoint.experts:
        yield "experts"
    if has_dense_layers(checkpoint):
        yield "dense_layers"
    if more.get("first_k_dense_replace", 1) != 1:
        yield "other_dense_prefix"
    yield "unscaled_rope" if checkpoint.rotary_scaling is None else "scaled_rope"
    if more.get("v_head_dim") != more.get("qk_nope_head_dim"):
        yield "uneven_heads"
    if checkpoint.intermediate_size != 4 * checkpoint.hidden_size:
        yield "other_ffn"
    patterns = checkpoint.quantization.exclude_modules
    if patterns is not None and not any(fnmatchcase("transformer.ln_f", pattern) for pattern in patterns):
        yield "quantised_final_norm"
    if excluded_rows(checkpoint, family):
        yield "excluded_linears"
