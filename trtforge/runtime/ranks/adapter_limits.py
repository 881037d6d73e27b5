"""Which adapters an engine has, and how many may run at once, as its scheduler needs it."""

from dataclasses import dataclass

from trtforge.runtime.adapters.rank_adapters import most_adapters
from trtforge.runtime.ranks.rank_model import placement_of
from trtforge.runtime.ranks.source import Source


@dataclass(frozen=True)
class AdapterLimits:
    """`task_ids` of the adapters that requests may name; `most` of them fit the cache of each rank at once."""

    task_ids: range = range(0)
    most: int = 0


def adapter_limits(source: Source) -> AdapterLimits:
    """The limits of an engine. Raises ForgeError if not one adapter fits."""
    lora = source.forge.features.lora
    if lora is None:
        return AdapterLimits()
    most = most_adapters(lora, source.config, source.spec(0), placement_of(source, 0))
    return AdapterLimits(range(1, len(lora.adapters) + 1), most)
