"""The parallel layout and its ranks: tensor, pipeline, expert and context parallelism, numbered as in TensorRT-LLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtforge.core.errors import ForgeError
from trtforge.core.plausible import LARGEST


@dataclass(frozen=True)
class Rank:
    """One rank file of a checkpoint or engine: `index` = pp_rank * tp + tp_rank."""

    index: int
    tp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class Parallel:
    """A parallel layout. `ep` groups of whole experts; each expert is split over tp/ep ranks.

    Source: tensorrt_llm/mapping.py (world = tp * pp * cp; moe_tp * moe_ep = tp). Context-parallel ranks read the
    same rank files, so `cp` adds processes but no files.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "cp"):
            if getattr(self, name) < 1:
                raise ForgeError(
                    f"{name} must be at least 1, not {getattr(self, name)}", hint=f"Use --{name} 1 or more."
                )
            if getattr(self, name) > LARGEST[name]:
                raise ForgeError(
                    f"{name} {getattr(self, name)} is implausible: the limit is {LARGEST[name]:,}",
                    hint="Give the number of GPUs that share the model.",
                )
        if self.tp % self.ep:
            raise ForgeError(
                f"ep {self.ep} does not divide tp {self.tp}",
                hint="Experts are split within the tensor-parallel ranks: choose an ep that divides tp.",
            )

    @property
    def world_size(self) -> int:
        """Number of processes that serve the engine."""
        return self.tp * self.pp * self.cp

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The rank files, in order."""
        return tuple(Rank(p * self.tp + t, t, p) for p in range(self.pp) for t in range(self.tp))

    def layers_of(self, pp_rank: int, num_layers: int) -> range:
        """The decoder layers of one pipeline stage; `num_layers` divides evenly (checked by plan.legality)."""
        per_stage = num_layers // self.pp
        return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)

    def mapping(self) -> dict[str, int]:
        """The `mapping` object of a checkpoint's config.json: the keys that 0.17 to 1.2 all accept."""
        return {
            "world_size": self.world_size,
            "gpus_per_node": 8,
            "cp_size": self.cp,
            "tp_size": self.tp,
            "pp_size": self.pp,
            "moe_tp_size": self.tp // self.ep,
            "moe_ep_size": self.ep,
        }

    @classmethod
    def of_mapping(cls, mapping: Mapping[str, Any]) -> "Parallel":
        """The layout that a config.json's `mapping` describes."""
        return cls(
            tp=_size(mapping, "tp_size"),
            pp=_size(mapping, "pp_size"),
            ep=max(1, _size(mapping, "moe_ep_size")),  # -1: not set
            cp=_size(mapping, "cp_size"),
        )


def _size(mapping: Mapping[str, Any], key: str) -> int:
    value = mapping.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ForgeError(f"config.json: mapping.{key} is {value!r}, not an integer", hint="Build the directory again.")
    return value
