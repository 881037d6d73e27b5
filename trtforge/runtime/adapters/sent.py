"""LoRA adapters in requests: converts TensorRT-LLM's `lora_config` and `lora_weights` to the file that ranks read.

From TensorRT-LLM 1.x: layout and scale (examples/hf_lora_convert.py), module ids (tensorrt_llm/lora_manager.py) and
checks (`loraValidateRequestTensors`, cpp/tensorrt_llm/runtime/loraUtils.cpp).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from trtforge.core.errors import RequestError
from trtforge.core.features import LoraModule
from trtforge.engine_process.requests import SentAdapter
from trtforge.formats.adapter import ADAPTER_FILES, PEFT_MODULES
from trtforge.models.torch_tensors import all_finite, write_tensors
from trtforge.runtime.adapters.parts import Part, Range
from trtforge.runtime.linears.kernels import DTYPES

_MODULES: tuple[LoraModule, ...] = get_args(LoraModule)
"""LoRA modules by their ids."""
_PEFT = {module: name for name, module in reversed(list(PEFT_MODULES.items()))}
"""The first name of each module, Llama's or Phi-3's."""
_NAMED = 1 << 62
_HINT = "Send the tensors that TensorRT-LLM's hf_lora_convert.py writes for an adapter of this model."


@dataclass(frozen=True)
class Adaptable:
    """What adapters may change: modules in each of `layers` layers, with ranks up to `rank`. `dtype`: of the
    computation."""

    parts: Mapping[LoraModule, Part]
    layers: int
    rank: int
    dtype: torch.dtype


def name_of(adapter: SentAdapter) -> int:
    """A digest of an adapter as an int64 of at least 2^62, which no task id of the engine's own adapters reaches."""
    digest = blake2b(repr((adapter.config, adapter.dtype, adapter.width)).encode(), digest_size=8)
    digest.update(adapter.weights)
    return _NAMED | (int.from_bytes(digest.digest(), "little") % _NAMED)


def write_adapter(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write the tensors of an adapter to a new directory. Raises ForgeError, OSError."""
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700)
    write_tensors(directory / ADAPTER_FILES[1], tensors)


def sent_tensors(adapter: SentAdapter, adaptable: Adaptable) -> dict[str, Tensor]:
    """A and B of each module by PEFT names of its kind, B with rows as PEFT saves them and with the scale.

    Raises RequestError that names the wrong tensor.
    """
    dtype, rows = DTYPES[adapter.dtype], adapter.config
    if len(adapter.weights) != len(rows) * adapter.width * dtype.itemsize or not adapter.weights:
        raise RequestError(
            f"lora_weights has {len(adapter.weights)} bytes, lora_config describes {len(rows)} modules of "
            f"{adapter.width} {adapter.dtype} values",
            hint=_HINT,
        )
    weights = torch.frombuffer(bytearray(adapter.weights), dtype=dtype).view(len(rows), adapter.width)
    found: dict[str, Tensor] = {}
    for number, (row, values) in enumerate(zip(rows, weights, strict=True)):
        module, layer, rank = _checked(number, row, adaptable)
        out, inputs = adaptable.parts[module].shape
        where = f"module {number} ({module} of layer {layer}, rank {rank})"
        if rank * (out + inputs) > adapter.width:
            raise RequestError(
                f"lora_weights has {adapter.width} values for {where}, which needs {rank * (out + inputs)}", hint=_HINT
            )
        a, b = values[: rank * inputs], values[rank * inputs : rank * (inputs + out)].view(out, rank)
        if not (all_finite(a.to(adaptable.dtype)) and all_finite(b.to(adaptable.dtype))):
            raise RequestError(f"lora_weights of {where} has numbers that are not finite", hint=_HINT)
        b = _as_saved(b, adaptable.parts[module].order or ((0, out),))
        name = f"layers.{layer}.mlp.{_PEFT[module]}" if module.startswith("mlp") else ""
        name = name or f"layers.{layer}.self_attn.{_PEFT[module]}"
        if f"{name}.lora_A.weight" in found:
            raise RequestError(f"lora_config has {module} of layer {layer} twice", hint=_HINT)
        found |= {f"{name}.lora_A.weight": a.view(rank, inputs).clone(), f"{name}.lora_B.weight": b}
    return found


def _as_saved(b: Tensor, order: Sequence[Range]) -> Tensor:
    """A copy of B (outputs, rank) with its rows as PEFT saves them; `order`: those of TensorRT-LLM, see Part."""
    saved, first = torch.empty_like(b), 0
    for start, stop in order:
        saved[start:stop] = b[first : first + stop - start]
        first += stop - start
    return saved


def _checked(number: int, row: tuple[int, ...], adaptable: Adaptable) -> tuple[LoraModule, int, int]:
    """Module, layer and rank of a `lora_config` row, checked."""
    if len(row) not in (3, 4):
        raise RequestError(f"lora_config has {len(row)} columns, 3 or 4 are expected", hint=_HINT)
    code, layer, rank = row[:3]
    module = _MODULES[code] if 0 <= code < len(_MODULES) else None
    if module is None or module not in adaptable.parts:
        known = ", ".join(f"{_MODULES.index(each)} ({each})" for each in adaptable.parts)
        raise RequestError(
            f"lora_config has module id {code} in row {number}, which this engine does not support",
            hint=f"It supports {known}: compile with --feature lora.modules=[…] for others.",
        )
    for what, value, least, most in (
        ("layer", layer, 0, adaptable.layers - 1),
        ("rank", rank, 1, adaptable.rank),
    ):
        if not least <= value <= most:
            raise RequestError(
                f"lora_config has {what} {value} in row {number}", hint=f"It must be from {least} to {most}."
            )
    if len(row) == 4 and row[3]:
        raise RequestError(f"lora_config has DoRA in row {number}", hint="Send an adapter without DoRA.")
    return module, layer, rank
