"""What the layer stream of verification makes of a Hugging Face directory: weights of layers, and logits."""

from pathlib import Path

import torch
from torch import Tensor

from trtforge.formats.hf import open_checkpoint
from trtforge.models.registry import family_of_checkpoint
from trtforge.reference.hidden import HiddenStates
from trtforge.verify.reference import stream_reference


def streamed(directory: Path, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The parameters of the decoder layers by their names in the model, and logits of ids (windows, length)."""
    checkpoint = open_checkpoint(directory)
    family = family_of_checkpoint(checkpoint)
    stream = stream_reference(checkpoint)
    hidden_size = family.facts(checkpoint.config).sizes.hidden
    hidden = HiddenStates([tuple(ids.shape)], hidden_size, torch.float32, torch.device("cpu"))
    weights: dict[str, Tensor] = {}
    with torch.inference_mode():
        for layer in stream.layers([ids], hidden):
            prefix = f"{family.layer_path}.{layer.index}."
            weights |= {prefix + name: tensor.clone() for name, tensor in layer.module.named_parameters()}
            layer.run()
        (logits,) = stream.logits([ids], hidden)
    stream.close()
    return weights, logits


def assert_streams(directory: Path, model: torch.nn.Module, ids: Tensor, *, exact: bool = True) -> None:
    """The stream has the weights and the logits of `model`."""
    weights, logits = streamed(directory, ids)
    meant = dict(model.named_parameters())
    assert weights
    for name, tensor in weights.items():
        assert torch.allclose(tensor, meant[name], rtol=0 if exact else 1e-6, atol=0), name
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    assert logits.shape == expected.shape
    assert float((logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
