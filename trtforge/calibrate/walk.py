"""One pass over the data, layer by layer, that can be resumed after a kill.

Each layer's results are written when it is done. Hidden states are saved once a minute, so a resumed run repeats at
most a minute of layers, with the same results.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtforge.calibrate.kv_scale import PROBED_BATCHES, search_scale
from trtforge.calibrate.layer import LayerObserver, Needs, nonfinite_activations
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import record_of
from trtforge.core.partial import Finished, Group
from trtforge.core.progress import Bar
from trtforge.formats.calibration import codes_file
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.tensor_files import load_tensors
from trtforge.models.family import Facts, Family
from trtforge.models.torch_tensors import write_tensors
from trtforge.reference.hidden import HiddenStates
from trtforge.reference.streaming import LayerStream
from trtforge.reference.weights import LayerWeights

_LOG = logging.getLogger(__name__)
_SAVED = "hidden-states"
_SECONDS_BETWEEN_SAVES = 60.0
_PASS_OF_SEARCH = 0.5  # share of the data pass in the time of a layer with an AWQ search, for progress bars


class Walk:
    """Measures every layer of a checkpoint; `directory`: the unfinished artifact."""

    def __init__(
        self,
        checkpoint: HfCheckpoint,
        family: Family,
        facts: Facts,
        needs: Needs,
        device: torch.device,
        dtype: torch.dtype,
        directory: Path,
    ) -> None:
        self._family, self._facts, self._needs = family, facts, needs
        self._device, self._dtype, self._directory = device, dtype, directory
        weights = LayerWeights(checkpoint, family, device, dtype)
        self._stream = LayerStream(weights, observes_cache=needs.kv_cache)
        self._finished = Finished.read(directory)

    def run(self, batches: Sequence[Tensor], budget: int | None, bar: Bar) -> dict[str, Tensor]:
        """All results, float32 on the CPU, by name. `budget`: bytes of hidden states to keep in memory."""
        hidden = HiddenStates(
            [(len(batch), batch.shape[1]) for batch in batches],
            self._facts.sizes.hidden,
            self._dtype,
            self._device,
            budget=budget,
            directory=self._directory,
        )

        of_pass = _PASS_OF_SEARCH if self._needs.awq else 1.0

        def passed(share: float) -> None:
            """Advance the bar by a part of a layer's pass over the data, which precedes the search for its scales."""
            bar.advance(share * of_pass)

        first = self._resume(hidden)
        bar.advance(first)
        saved = time.monotonic()
        try:
            for layer in self._stream.layers(batches, hidden, first):
                observer = LayerObserver(layer.module, layer.index, self._family, self._facts, self._needs)
                probed = self._needs.kv_search != "none" and layer.index not in self._facts.sizes.linear_layers
                count = min(PROBED_BATCHES, len(hidden)) if probed else 0
                inputs = [hidden.get(batch).clone() for batch in range(count)]
                with observer:
                    layer.run(passed)
                prefix = f"{self._family.layer_prefix}.{layer.index}."
                results = observer.results()
                tensors = {prefix + name: tensor for name, tensor in results.tensors.items()}
                if self._needs.kv_cache and layer.index not in self._facts.sizes.linear_layers:
                    amax = tensors[f"layers.{layer.index}.kv_amax"] = self._stream.cache.take()
                    _require_scale(amax, layer.index, self._dtype)
                    if inputs:
                        tensors[f"layers.{layer.index}.kv_scale"] = search_scale(
                            layer, observer.attention, inputs, self._stream.cache, amax, self._needs.kv_search
                        )
                self._keep(layer.index, tensors, {prefix + name: tensor for name, tensor in results.codes.items()})
                del observer, tensors, results, inputs
                bar.advance(1 - of_pass)
                if time.monotonic() - saved > _SECONDS_BETWEEN_SAVES:
                    self._save(hidden, layer.index + 1)
                    saved = time.monotonic()
        finally:
            hidden.close()
            self._stream.close()
        return self._collect()

    def _keep(self, layer: int, tensors: dict[str, Tensor], codes: dict[str, Tensor]) -> None:
        """Write a layer's results; its codes stay in a separate file, which conversion reads by rows."""
        contents = {_results(layer): {name: tensor.float() for name, tensor in tensors.items()}}
        if self._needs.compensated:
            contents[codes_file(layer)] = codes
        for name, kept in contents.items():
            write_tensors(self._directory / name, {key: kept[key].cpu().contiguous() for key in sorted(kept)})
        files = {name: record_of(self._directory / name) for name in contents}
        self._finished.add(Group(made_from="", files=files))

    def _save(self, hidden: HiddenStates, next_layer: int) -> None:
        """Save the hidden states for a resumed run. A full disk only causes a warning."""
        path = self._directory / _SAVED
        new = path.with_suffix(".new")
        try:
            hidden.save(new)
        except OSError as error:
            new.unlink(missing_ok=True)
            _LOG.warning("hidden states are not saved (%s): a killed run resumes from the last save", error.strerror)
            return
        new.replace(path)
        self._finished.add(Group(made_from=str(next_layer), files={path.name: record_of(path)}))

    def _resume(self, hidden: HiddenStates) -> int:
        """The first layer to compute; its inputs are restored into `hidden`, except for layer 0."""
        group = self._finished.group([_SAVED])
        if group is None:
            return 0
        first = int(group.made_from)
        if any(self._finished.group(self._files(layer)) is None for layer in range(first)):
            return 0
        hidden.restore(self._directory / _SAVED)
        return first

    def _files(self, layer: int) -> list[str]:
        return [_results(layer), codes_file(layer)] if self._needs.compensated else [_results(layer)]

    def _collect(self) -> dict[str, Tensor]:
        """The results of all layers in order of name. Deletes their files, which are not part of the artifact."""
        found: dict[str, Tensor] = {}
        for layer in range(self._facts.sizes.num_layers):
            path = self._directory / _results(layer)
            found |= load_tensors(path)
            path.unlink()
        (self._directory / _SAVED).unlink(missing_ok=True)
        return dict(sorted(found.items()))


def _require_scale(kv_amax: Tensor, layer: int, dtype: torch.dtype) -> None:
    if not kv_amax.isfinite():
        raise nonfinite_activations(f"a key or value of layer {layer}", dtype)
    if not kv_amax.any():
        raise ForgeError(
            f"all keys and values of layer {layer} are zero: its KV cache has no scaling factor",
            hint="Use an undamaged checkpoint, or --kv-cache none.",
        )


def _results(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"
