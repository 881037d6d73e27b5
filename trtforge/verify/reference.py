"""The reference: `transformers`' own model in float32; of a quantised checkpoint with the weights that it means."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from trtforge.formats.hf import open_checkpoint, read_config
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.verify.dequantized import load_dequantized


@dataclass(frozen=True)
class Reference:
    """A loaded Hugging Face model."""

    model: PreTrainedModel

    def logits(self, ids: Tensor) -> Tensor:
        """(length, vocab) float32 for int64 ids (length,)."""
        output: Tensor = self.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        return output


def load_reference(directory: Path) -> Reference:
    """The model at `directory`, in float32 on the CPU."""
    disable_progress_bar()
    source = read_quantized_source(read_config(directory))
    if source is not None:
        return Reference(load_dequantized(open_checkpoint(directory), source).eval())
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    return Reference(model.eval())
