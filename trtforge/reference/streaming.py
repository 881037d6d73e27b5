"""Runs a Hugging Face model layer by layer: `transformers`' modules, with one decoder layer's weights in memory.

The hidden states of all windows are kept between layers (reference.hidden), so each weight is read once for any amount
of data. The rest of the model runs before the first and after the last layer; stand-ins for the layers record their
inputs or return the last layer's output.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.heap import trim
from trtforge.core.memory_errors import out_of_memory
from trtforge.core.share import Share, not_shown
from trtforge.formats.flag_numbers import config_with_flags
from trtforge.formats.hf import CONFIG
from trtforge.reference.hidden import HiddenStates
from trtforge.reference.weights import LayerWeights


@dataclass(frozen=True)
class LoadedLayer:
    """One decoder layer with its weights.

    `compute` returns the output of one batch, given its index and hidden states (windows, length, hidden).
    """

    index: int
    module: nn.Module
    compute: Callable[[int, Tensor], Tensor]
    hidden: HiddenStates
    batches: int

    def run(self, finished: Share = not_shown) -> None:
        """Compute all batches and keep the outputs; `finished` is called with the share of each batch."""
        for batch in range(self.batches):
            self.hidden.put(batch, self.compute(batch, self.hidden.get(batch)))
            finished(1 / self.batches)


@dataclass(frozen=True)
class _Call:
    """A layer's arguments besides the hidden states: masks, positions."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class _Passed(Tensor):
    """Hidden states as a layer's return value: some models use item 0 of it, others the whole."""

    def __getitem__(self, index: Any) -> Tensor:
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)


class _StandIn(nn.Module):
    """Replaces a layer: records its inputs, returns the hidden states, and has the layer's attributes.

    `answer`: returned instead of the hidden states.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.call: _Call | None = None
        self.hidden: Tensor | None = None
        self.answer: Tensor | None = None
        object.__setattr__(self, "_layer", layer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        self.call, self.hidden = _Call(arguments, keywords), hidden.as_subclass(Tensor)
        return (hidden if self.answer is None else self.answer).as_subclass(_Passed)


class CacheObserver(DynamicCache):
    """Replaces the KV cache without storing anything. `observes`: record the amax of all keys and values.

    `rounded`: rounds the keys and values that attention gets.
    """

    def __init__(self, *, observes: bool) -> None:
        super().__init__()
        self._observes = observes
        self.amax = torch.zeros(1)
        self.rounded: Callable[[Tensor], Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record the amax, and return the keys and values, rounded if `rounded` is set."""
        if self._observes:
            largest = torch.maximum(key_states.abs().amax(), value_states.abs().amax())
            self.amax = torch.maximum(self.amax, largest.float().cpu())
        if self.rounded is not None:
            return self.rounded(key_states), self.rounded(value_states)
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, because each batch is a whole sequence."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Like `get_conv_state`."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """The inputs that the layer convolves: the given ones, as no others precede them."""
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """The given states."""
        return recurrent_states

    def take(self) -> Tensor:
        """The amax since the last call, (1,) float32."""
        amax, self.amax = self.amax, torch.zeros(1)
        return amax


class LayerStream:
    """A model whose decoder layers are loaded one after another."""

    def __init__(self, weights: LayerWeights, *, observes_cache: bool = False) -> None:
        # it warns of each faster kernel that is not installed
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
        self.cache = CacheObserver(observes=observes_cache)
        self._weights, self._device = weights, weights.device
        parent, _, self._name = weights.family.layer_path.rpartition(".")
        with _naming_config(weights.directory), _parameters_on_meta():
            config = config_with_flags(weights.directory) or AutoConfig.from_pretrained(
                weights.directory, trust_remote_code=False
            )
            if weights.family.nested:
                config = config.get_text_config()
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # weights are loaded dequantised
            model = AutoModelForCausalLM.from_config(config, dtype=weights.dtype, trust_remote_code=False)
            base = model.get_submodule(parent)
        self._model = model.eval()
        self._path, self._base = parent, base
        self._layers: list[nn.Module] = list(self._base.get_submodule(self._name).children())
        self._stand_ins = [_StandIn(layer) for layer in self._layers]
        setattr(self._base, self._name, nn.ModuleList(self._stand_ins))

    def layers(self, batches: Sequence[Tensor], hidden: HiddenStates, first: int = 0) -> Iterator[LoadedLayer]:
        """Each layer from `first` on, loaded; call its `run` once before taking the next.

        `batches` are int64 token ids (windows, length). `hidden` holds the inputs of layer `first`; for layer 0 they
        are computed here.
        """
        calls = self._enter(batches, hidden if first == 0 else None)
        shapes = [tuple(batch.shape) for batch in batches]
        for index in range(first, len(self._layers)):
            layer = self._weights.load(self._layers[index], index).to(self._device)

            def compute(batch: int, states: Tensor, layer: nn.Module = layer, index: int = index) -> Tensor:
                call = calls[shapes[batch]][index]
                with _naming_config(self._weights.directory):
                    result = layer(states, *call.arguments, **call.keywords)
                output: Tensor = result[0] if isinstance(result, tuple) else result
                return output

            yield LoadedLayer(index, layer, compute, hidden, len(shapes))
            layer.to("meta")
            trim()

    def logits(self, batches: Sequence[Tensor], hidden: HiddenStates) -> Iterator[Tensor]:
        """Logits of each batch (windows, length, vocabulary); `hidden` holds the last layer's outputs."""
        head: Any = self._model.get_output_embeddings()
        with self._weights.surroundings(self._base, self._path) as embed, self._weights.head(head):
            for index, batch in enumerate(batches):
                self._stand_ins[-1].answer = hidden.get(index)
                ids = embed(batch).to(self._device)
                with _naming_config(self._weights.directory):
                    output = self._model(input_ids=ids, use_cache=True, **{_cache_name(self._model): self.cache})
                yield output.logits.as_subclass(Tensor)
        self._stand_ins[-1].answer = None

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._weights.close()

    def _enter(self, batches: Sequence[Tensor], hidden: HiddenStates | None) -> Mapping[tuple[int, ...], list[_Call]]:
        """Run the model up to its layers; returns the layers' other arguments, which depend only on the batch shape."""
        stand_ins = self._stand_ins
        calls: dict[tuple[int, ...], list[_Call]] = {}
        with self._weights.surroundings(self._base, self._path) as embed:
            for index, batch in enumerate(batches):
                shape = tuple(batch.shape)
                if hidden is None and shape in calls:
                    continue
                ids = embed(batch).to(self._device)
                with _naming_config(self._weights.directory):
                    self._base(input_ids=ids, use_cache=True, **{_cache_name(self._base): self.cache})
                calls.setdefault(shape, [stand_in.call for stand_in in stand_ins if stand_in.call is not None])
                if hidden is not None:
                    assert stand_ins[0].hidden is not None
                    hidden.put(index, stand_ins[0].hidden)
        return calls


def _cache_name(model: nn.Module) -> str:
    """The argument for the KV cache: `cache` in transformers 5.24 and later, which warns of the older name."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


@contextmanager
def _naming_config(directory: Path) -> Iterator[None]:
    """Raise ForgeError naming config.json for any exception of `transformers`, whose types vary."""
    try:
        yield
    except (ForgeError, OSError, AssertionError):
        raise
    except Exception as error:
        if out_of_memory(error) is not None:
            raise
        raise ForgeError(
            f"{directory / CONFIG}: transformers cannot compute the model: {type(error).__name__}: {first_line(error)}",
            hint="Use the config.json that came with the model; --verbose shows where it fails.",
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules created in the block have parameters on meta but real buffers, as checkpoints do not store buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # else transformers fills it at random
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
