"""Observes the linears of one decoder layer during the forward pass and computes calibration tensors from it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.calibrate.awq import AwqChoice, clip_ratios, search
from trtforge.calibrate.experts import watch_biased_experts, watch_experts, watch_stacked_experts
from trtforge.calibrate.grids import Grid, Int4Grid, Nvfp4Grid
from trtforge.calibrate.rounding import Input, Rounded, round_linears
from trtforge.calibrate.row_grid import RowGrid
from trtforge.calibrate.statistics import InputStatistics
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import KvCacheFormat
from trtforge.models.family import Experts, Facts, Family, Linear, Split
from trtforge.models.transforms import nvfp4_global_scale
from trtforge.models.weight_only import row_parts


@dataclass(frozen=True)
class Needs:
    """The measurements that the weight and KV cache formats need. `group_size`: of AWQ.

    `kv_search`: the format for which scales of the KV cache are searched; none: the amax suffices. `magnitudes`: the
    amax of each linear's input becomes a scaling factor. `compensated`: weights are rounded here, with compensation: to
    INT4; to NVFP4 if the noise of NVFP4 inputs is measured (`nvfp4`); or to values that TensorRT-LLM's build rounds to
    INT4 with one scale per output (`whole_rows`). `clip` then has no effect, as ranges are always searched.
    """

    magnitudes: bool = True
    channels: bool = False
    kv_cache: bool = False
    kv_search: KvCacheFormat = "none"
    awq: bool = False
    clip: bool = False
    compensated: bool = False
    nvfp4: bool = False
    whole_rows: bool = False
    group_size: int = 128

    @property
    def means_only(self) -> bool:
        """True if only mean activations are needed."""
        return not (self.magnitudes or self.channels or self.kv_cache)


def nonfinite_activations(what: str, dtype: torch.dtype) -> ForgeError:
    """The error for a NaN or infinite `what` in a model that ran in `dtype`."""
    name = str(dtype).removeprefix("torch.")
    return ForgeError(
        f"{what} is NaN or infinite: the model overflows {name}, or its weights are damaged",
        hint="Calibrate with --device cpu, which computes in float32."
        if dtype is torch.float16
        else "Use an undamaged checkpoint, or other data.",
    )


class LayerObserver:
    """Hooks on the linears in the family's table; linears that read the same input share its statistics."""

    def __init__(self, layer: nn.Module, index: int, family: Family, facts: Facts, needs: Needs) -> None:
        self._layer, self._needs = layer, needs
        self._family, self.prefix = family, f"{family.layer_prefix}.{index}"
        self._linears = [row for row in family.linears if facts.holds(row.when, index)]
        self._experts = [row for row in family.experts if facts.holds(row.when, index)]
        self._statistics: dict[str, InputStatistics] = {}
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> "LayerObserver":
        for row in self._linears:
            if row.shares_input is None:
                module = self.module(row.parts[0].module)
                weight: Tensor = module.weight  # type: ignore[assignment]
                features = weight.shape[0 if row.conv1d else 1]
                statistics = self._statistics[row.target] = self._empty(features, weight.device)
                self._undo.append(module.register_forward_pre_hook(_observe(statistics)).remove)
        if self._experts:
            self._undo.append(self._watch_experts())
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def results(self) -> Rounded:
        """Calibration tensors by name within the layer (formats.calibration). A fused module is measured once.

        Raises ForgeError naming a linear whose input is NaN or infinite.
        """
        found = Rounded()
        seen: set[str] = set()
        for name, weight, statistics in self._weights():
            if name not in seen:
                seen.add(name)
                self._measure(name, weight, statistics, found.tensors)
        if self._needs.compensated:
            for inputs in self._inputs(found.tensors):
                self._round(inputs, found)
        return found

    def dense(self) -> Iterator[tuple[str, Tensor, InputStatistics, Linear]]:
        """Name within the layer, matrix (out, in) float32, input statistics and row of each linear but experts."""
        for row in self._linears:
            for part in row.parts:
                statistics = self._statistics[row.shares_input or row.target]
                yield part.module, _weight(self.module(part.module), row), statistics, row

    def module(self, name: str) -> nn.Module:
        """A module of the layer, by the name that the checkpoint gives it."""
        renamed: Mapping[str, str] = {theirs: ours for ours, theirs in self._family.modules_renamed.items()}
        return self._layer.get_submodule(renamed.get(name, name))

    @property
    def attention(self) -> nn.Module:
        """The module with the query, key and value projections; the whole layer if they are not in one module."""
        row = next((row for row in self._linears if row.target == "attention.qkv"), None)
        name = row.parts[0].module.rpartition(".")[0] if row else ""
        return self.module(name) if name else self._layer

    def _round(self, inputs: list[Input], found: Rounded) -> None:
        rounded = round_linears(inputs, smoothed=self._needs.awq, columns=self._needs.channels)
        found.codes |= rounded.codes
        for name, tensor in rounded.tensors.items():
            if name.endswith(".weight_column_amax"):  # dequantised codes may be larger than the weight
                tensor = torch.maximum(found.tensors[name], tensor)
            found.tensors[name] = tensor

    def _measure(self, name: str, weight: Tensor, statistics: InputStatistics, tensors: dict[str, Tensor]) -> None:
        needs = self._needs
        magnitudes = weight.abs()
        input_amax, weight_amax = statistics.amax.clone(), magnitudes.amax().reshape(1)
        if not input_amax.isfinite():
            dtype = next(self._layer.parameters()).dtype
            raise nonfinite_activations(f"an input of {self.prefix}.{name}", dtype)
        tensors[f"{name}.dead_channels"] = (statistics.channel_amax == 0).sum().float().reshape(1)
        tensors[f"{name}.input_amax"], tensors[f"{name}.weight_amax"] = input_amax, weight_amax
        if not weight_amax.any():
            tensors[f"{name}.zero_weight"] = torch.ones(1)
        if needs.channels:
            tensors[f"{name}.input_channel_amax"] = statistics.channel_amax.clone()
            tensors[f"{name}.weight_column_amax"] = magnitudes.amax(dim=0)
        del magnitudes  # as large as the weight
        if needs.awq and not needs.compensated:
            if statistics.tokens == 0:  # an expert that no token reached
                choice = AwqChoice(0.0, torch.ones_like(statistics.channel_amax), 0.0)
            else:
                choice = search(weight, statistics, needs.group_size)
            tensors[f"{name}.pre_quant_scale"] = choice.pre_quant_scale
            tensors[f"{name}.alpha"] = torch.tensor([choice.alpha])
            tensors[f"{name}.output_error"] = torch.tensor([choice.error])
            if needs.clip:
                ratios = clip_ratios(weight, choice.pre_quant_scale, statistics.rows, needs.group_size)
                tensors[f"{name}.clip_ratio"] = ratios

    def _weights(self) -> Iterator[tuple[str, Tensor, InputStatistics]]:
        """Module name in the checkpoint, matrix (out, in) float32 and input statistics of every linear."""
        for row in self._linears:
            statistics = self._statistics[row.shares_input or row.target]
            for part in row.parts:
                yield part.module, _weight(self.module(part.module), row), statistics
        for experts in self._experts:
            yield from self._expert_weights(experts)

    def _inputs(self, measured: Mapping[str, Tensor]) -> Iterator[list[Input]]:
        """The inputs of the linears, grouped by shared pre-quantisation scale.

        `measured`: results so far.

        All linears that read one input share a scale, also those that TensorRT-LLM's layers do not join, so that the
        codes are valid for every layout (models.checkpoint_plan, `shared_pre_quant_scale`).
        """
        for row in self._linears:
            if row.shares_input is None:
                readers = (row, *(other for other in self._linears if other.shares_input == row.target))
                parts = {part.module: each for each in readers if each.quantized for part in each.parts}
                if parts:
                    yield [self._input(self._statistics[row.target], parts, measured)]
        for experts in self._experts:
            yield [self._expert_input(experts, expert) for expert in range(len(self._expert_tensor(experts)))]

    def _input(self, statistics: InputStatistics, parts: Mapping[str, Linear], measured: Mapping[str, Tensor]) -> Input:
        def weight() -> Tensor:
            matrices = [_weight(self.module(name), row) for name, row in parts.items()]
            return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

        weights: list[Tensor] = [self.module(name).weight for name in parts]  # type: ignore[misc]
        outputs = [stored.shape[1 if row.conv1d else 0] for stored, row in zip(weights, parts.values(), strict=True)]
        grid = self._int4_grid(statistics.channel_amax, *parts.values())
        if self._needs.nvfp4:
            scales = [
                self._tensor_scale(row, measured).expand(each)
                for row, each in zip(parts.values(), outputs, strict=True)
            ]
            grid = Nvfp4Grid(torch.cat(scales))
        return Input(statistics, tuple(parts), tuple(outputs), weight, grid)

    def _tensor_scale(self, row: Linear, measured: Mapping[str, Tensor]) -> Tensor:
        """(1,) NVFP4's scale of the tensors that share one with `row`."""
        leader = row.shares_scale or row.target
        sharing = [other for other in self._linears if (other.shares_scale or other.target) == leader]
        amax = [measured[f"{part.module}.weight_amax"] for other in sharing for part in other.parts]
        return nvfp4_global_scale(torch.stack(amax).amax(dim=0))

    def _expert_input(self, row: Experts, expert: int) -> Input:
        experts = self._expert_tensor(row)
        stored = experts[expert]
        names = tuple(dict.fromkeys(part.module.format(expert) for part in reversed(row.parts)))
        heights = (len(stored) // len(names),) * len(names)
        statistics = self._of_expert(row.target, expert, stored.shape[1], stored.device)
        grid = self._int4_grid(statistics.channel_amax, row)
        if self._needs.nvfp4:  # gate and up share one scale, stacked experts too
            largest = (experts if row.stacked else stored).abs().amax()
            scale = nvfp4_global_scale(largest.float().reshape(1))
            grid = Nvfp4Grid(scale.expand(len(stored)))
        return Input(statistics, names, heights, stored.float, grid)

    def _int4_grid(self, inputs: Tensor, *readers: Linear | Experts) -> Grid:
        """The grid of the linears `readers`; `inputs` (in,) has one value per input."""
        if not self._needs.whole_rows:
            return Int4Grid(self._needs.group_size)
        split = any(row.split is Split.ROW for row in readers)
        return RowGrid(len(inputs), row_parts(len(inputs)) if split else 1)

    def _expert_tensor(self, row: Experts) -> Tensor:
        """(experts, out, in): gate and up, or down, of all experts."""
        name = "gate_up_proj" if row.target == "mlp.fc" else "down_proj"
        tensor: Tensor = getattr(self._expert_module(), name).detach()
        return tensor.mT if row.stacked else tensor

    def _expert_module(self) -> nn.Module:
        """The module with all experts; it is mlp.experts in all classes of `transformers` 5 unless checkpoints stack
        experts."""
        row = self._experts[0]
        return self._layer.get_submodule(row.parts[0].module.partition(".{}")[0] if row.stacked else "mlp.experts")

    def _watch_experts(self) -> Callable[[], None]:
        row, experts = self._experts[0], self._expert_module()
        if row.all_tokens:
            return watch_stacked_experts(experts, self._see_expert)
        return (watch_biased_experts if row.stacked else watch_experts)(experts, self._see_expert)

    def _expert_weights(self, row: Experts) -> Iterator[tuple[str, Tensor, InputStatistics]]:
        for expert, stored in enumerate(self._expert_tensor(row)):
            matrix = stored.float()
            statistics = self._of_expert(row.target, expert, matrix.shape[1], matrix.device)
            names = dict.fromkeys(part.module.format(expert) for part in reversed(row.parts))
            for name, piece in zip(names, matrix.chunk(len(names)), strict=True):
                yield name, piece, statistics

    def _of_expert(self, target: str, expert: int, features: int, device: torch.device) -> InputStatistics:
        return self._statistics.setdefault(f"{target}.{expert}", self._empty(features, device))

    def _see_expert(self, expert: int, inputs: Tensor, inner: Tensor) -> None:
        self._of_expert("mlp.fc", expert, inputs.shape[1], inputs.device).update(inputs)
        self._of_expert("mlp.proj", expert, inner.shape[1], inner.device).update(inner)

    def _empty(self, features: int, device: torch.device) -> InputStatistics:
        compensated = self._needs.compensated
        return InputStatistics.empty(
            features,
            device,
            sketch=self._needs.awq and not compensated,
            gram=compensated,
            noise=self._needs.nvfp4,
        )


def _weight(module: nn.Module, row: Linear) -> Tensor:
    weight: Tensor = module.weight  # type: ignore[assignment]
    matrix = weight.detach().float()
    return matrix.T.contiguous() if row.conv1d else matrix


def _observe(statistics: InputStatistics) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        statistics.update(inputs[0])

    return hook
