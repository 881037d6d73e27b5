"""Layers for multi-token prediction that have names of their own in a checkpoint, and other ones in TensorRT-LLM."""

from collections.abc import Iterable

from trtforge.models.family import Family


def predictor_modules(family: Family, names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Patterns of the modules of these tensors that are multi-token prediction's, by both names; none without any.

    TensorRT-LLM numbers its layers after the decoder's, and looks up what is quantised by either name
    (`mtp_layer_offset` in _torch/models/checkpoints/hf/qwen3_next_weight_mapper.py, `_experts_excluded_from_quant` in
    _torch/models/modeling_qwen3_next.py).
    """
    prefix = f"{family.predictor}layers."
    own = [name for name in names if family.predictor and name.startswith(family.predictor)]
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in own if name.startswith(prefix)}
    layers = max((int(number) for number in numbers if number.isdecimal() and len(number) < 3), default=0) + 1
    runtime = (f"{family.layer_prefix}.{num_layers + layer}.*" for layer in range(layers))
    return (f"{family.predictor}*", *runtime) if own else ()
