"""Walks a Hugging Face model one decoder layer at a time: `transformers`' own modules, one layer's weights in memory.

The hidden states of all windows wait between layers, so each weight is read once however much data there is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.transforms import TORCH

_ATTENTION = "trtforge_observed"


@dataclass(frozen=True)
class LoadedLayer:
    """One decoder layer with its weights; `run` sends all windows through it and keeps what comes out."""

    index: int
    module: nn.Module
    run: Callable[[], None]


class _CapturedInput(Exception):
    """The first layer was reached: nothing after it is needed."""


class _Catcher(nn.Module):
    """Stands in for all layers and keeps what the first would have got."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, dict[str, Any]]] = []

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.calls.append((hidden, arguments))
        raise _CapturedInput


class KeyValueObserver:
    """Largest magnitude of the keys (after the rotary embedding) and values that enter the KV cache."""

    def __init__(self) -> None:
        self.amax = torch.zeros(1)

    def __enter__(self) -> "KeyValueObserver":
        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
            self.amax = torch.maximum(self.amax, torch.maximum(key.abs().amax(), value.abs().amax()).float().cpu())
            return sdpa_attention_forward(module, query, key, value, *rest, **named)

        AttentionInterface.register(_ATTENTION, attention)
        return self

    def __exit__(self, *_: object) -> None:
        AttentionInterface.register(_ATTENTION, sdpa_attention_forward)

    def take(self) -> Tensor:
        """The value so far, (1,) float32; starts again from zero."""
        amax, self.amax = self.amax, torch.zeros(1)
        return amax


class LayerStream:
    """A model whose decoder layers are materialised one after another."""

    def __init__(self, checkpoint: HfCheckpoint, layer_prefix: str, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint, self._prefix, self._device, self._dtype = checkpoint, layer_prefix, device, dtype
        self._reader = RowReader()
        AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        self._base = self._skeleton()
        self._layers = list(self._base.get_submodule("layers").children())

    def layers(self, batches: Sequence[Tensor]) -> Iterator[LoadedLayer]:
        """Each layer in order, loaded; `run` must be called once before the next is asked for.

        `batches` are int64 token ids (windows, length).
        """
        hidden, arguments = self._embed(batches)
        for index, empty in enumerate(self._layers):
            prefix = f"{self._prefix}.{index}."
            layer = self._materialise(empty, prefix)

            def run(layer: nn.Module = layer) -> None:
                for batch, keywords in enumerate(arguments):
                    result = layer(hidden[batch], **keywords)
                    hidden[batch] = result[0] if isinstance(result, tuple) else result

            yield LoadedLayer(index, layer, run)
            layer.to("meta")

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._reader.close()

    def _skeleton(self) -> PreTrainedModel:
        """The decoder without weights, but with its embedding and with buffers that are computed, not stored."""
        config = AutoConfig.from_pretrained(self._checkpoint.directory, trust_remote_code=False)
        config.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=_ATTENTION, dtype=self._dtype, trust_remote_code=False
            )
        base = model.get_decoder()
        assert isinstance(base, PreTrainedModel)
        base.rotary_emb = type(base.get_submodule("rotary_emb"))(config=config).to(self._device)
        base.eval()
        return base

    def _embed(self, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """What the first layer gets for each batch: hidden states and its keyword arguments (masks, positions)."""
        base, catcher = self._base, _Catcher()
        embedding = self._materialise(base.get_submodule("embed_tokens"), "model.embed_tokens.")
        base.layers, base.embed_tokens = nn.ModuleList([catcher]), embedding
        for batch in batches:
            try:
                base(input_ids=batch.to(self._device), use_cache=False)
            except _CapturedInput:
                continue
        embedding.to("meta")
        return [hidden for hidden, _ in catcher.calls], [arguments for _, arguments in catcher.calls]

    def _materialise(self, module: nn.Module, prefix: str) -> nn.Module:
        """`module` with its weights read from the checkpoint, in the computing dtype."""
        state = {name: self._read(prefix + name) for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        return module

    def _read(self, name: str) -> Tensor:
        stored: StoredTensor = self._checkpoint.tensors[name]
        data = bytearray(stored.spec.nbytes)
        self._reader.read(stored, 0, stored.spec.shape[0], memoryview(data))
        tensor = torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name]).view(stored.spec.shape)
        if not torch.isfinite(tensor).all():
            raise ForgeError(f"{stored.file}: {name} holds NaN or infinity", hint="Use an undamaged checkpoint.")
        return tensor.to(self._device, self._dtype)
