"""Observes the linears of one decoder layer while data flows, and turns what was seen into calibration tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trtforge.calibrate.awq import search
from trtforge.calibrate.statistics import InputStatistics
from trtforge.models.family import Family, Linear


class LayerObserver:
    """Hooks on the linears that the family's table names; linears that read one input share its statistics."""

    def __init__(self, layer: nn.Module, family: Family, *, gram: bool) -> None:
        self._layer, self._gram = layer, gram
        self._statistics: dict[str, InputStatistics] = {}
        self._rows = family.linears
        self._handles: list[Any] = []

    def __enter__(self) -> "LayerObserver":
        for row in self._rows:
            if row.shares_input is None:
                module = self._module(row.parts[0].module)
                weight: Tensor = module.weight  # type: ignore[assignment]
                statistics = InputStatistics.empty(weight.shape[1], weight.device, gram=self._gram)
                self._statistics[row.target] = statistics
                self._handles.append(module.register_forward_pre_hook(_observe(statistics)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def results(self, group_size: int) -> dict[str, Tensor]:
        """`<module>.input_amax`, `.weight_amax` and, with a Gram matrix, `.pre_quant_scale`, named within the layer."""
        found: dict[str, Tensor] = {}
        for row in self._rows:
            statistics = self._statistics[self._input_of(row)]
            for part in row.parts:
                weight = self._module(part.module).weight.detach().float()  # type: ignore[operator]
                found[f"{part.module}.input_amax"] = statistics.amax
                found[f"{part.module}.weight_amax"] = weight.abs().amax().reshape(1)
                if self._gram:
                    choice = search(weight, statistics, group_size)
                    found[f"{part.module}.pre_quant_scale"] = choice.pre_quant_scale
        return {name: tensor.clone() for name, tensor in found.items()}

    @staticmethod
    def _input_of(row: Linear) -> str:
        return row.shares_input or row.target

    def _module(self, name: str) -> nn.Module:
        return self._layer.get_submodule(name)


def _observe(statistics: InputStatistics) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics.update(inputs[0])

    return hook
