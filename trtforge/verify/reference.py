"""The reference: the `transformers` model in float32, with dequantised weights for a quantised checkpoint."""

import torch

from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.models.registry import family_of_checkpoint
from trtforge.reference.streaming import LayerStream
from trtforge.reference.weights import LayerWeights
from trtforge.verify.dequantized import DequantizedWeights


def stream_reference(checkpoint: HfCheckpoint) -> LayerStream:
    """The model, one layer at a time, on the CPU."""
    source, family = read_quantized_source(checkpoint.config), family_of_checkpoint(checkpoint)
    if source is not None:
        return LayerStream(DequantizedWeights(checkpoint, family, source))
    return LayerStream(LayerWeights(checkpoint, family, torch.device("cpu"), torch.float32))
