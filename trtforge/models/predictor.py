"""Layers for multi-token prediction whose names differ between checkpoint and TensorRT-LLM."""

from collections.abc import Iterable

from trtforge.models.family import Family


def predictor_modules(family: Family, names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Patterns for the multi-token prediction modules among these tensors, by both names; empty without any.

    TensorRT-LLM numbers these layers after the decoder's, and looks up quantisation by either name (`mtp_layer_offset`
    in _torch/models/checkpoints/hf/qwen3_next_weight_mapper.py, `_experts_excluded_from_quant` in
    _torch/models/modeling_qwen3_next.py).
    """
    prefix = f"{family.predictor}layers."
    own = [name for name in names if family.predictor and name.startswith(family.predictor)]
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in own if name.startswith(prefix)}
    layers = max((int(number) for number in numbers if number.isdecimal() and len(number) < 3), default=0) + 1
    runtime = (f"{family.layer_prefix}.{num_layers + layer}.*" for layer in range(layers))
    return (f"{family.predictor}*", *runtime) if own else ()
