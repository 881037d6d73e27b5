"""trtforge converts a Hugging Face checkpoint to a verified Triton model repository for TensorRT-LLM.

The classes of the Python API are imported on first use, because they need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtforge.api.answers import Answer, Completion, Piece, TokenScore, Usage
    from trtforge.api.engine import Engine
    from trtforge.api.prompt_tables import read_prompt_table
    from trtforge.api.prompts import Chat, Tokens, Tuned
    from trtforge.api.sampling_params import SamplingParams
    from trtforge.engine_process.retention import KvCacheRetention, TokenRangeRetention
    from trtforge.runtime.iteration_statistics import (
        InflightBatchingStatistics,
        IterationStatistics,
        KvCacheStatistics,
        SpecDecodingStatistics,
    )
    from trtforge.runtime.scheduling.block_events import (
        KvCacheCreated,
        KvCacheEvent,
        KvCacheEventDiff,
        KvCacheRemoved,
        KvCacheStored,
        KvCacheStoredBlock,
        KvCacheUpdated,
    )

__version__ = "0.2.5"
__all__ = [
    "Answer",
    "Chat",
    "Completion",
    "Engine",
    "InflightBatchingStatistics",
    "IterationStatistics",
    "KvCacheCreated",
    "KvCacheEvent",
    "KvCacheEventDiff",
    "KvCacheRemoved",
    "KvCacheRetention",
    "KvCacheStatistics",
    "KvCacheStored",
    "KvCacheStoredBlock",
    "KvCacheUpdated",
    "Piece",
    "SamplingParams",
    "SpecDecodingStatistics",
    "TokenRangeRetention",
    "TokenScore",
    "Tokens",
    "Tuned",
    "Usage",
    "__version__",
    "read_prompt_table",
]

_PLACES = {
    "Engine": "api.engine",
    **dict.fromkeys(("Answer", "Completion", "Piece", "TokenScore", "Usage"), "api.answers"),
    **dict.fromkeys(("Chat", "Tokens", "Tuned"), "api.prompts"),
    "SamplingParams": "api.sampling_params",
    **dict.fromkeys(("KvCacheRetention", "TokenRangeRetention"), "engine_process.retention"),
    **dict.fromkeys(
        (
            "KvCacheCreated",
            "KvCacheEvent",
            "KvCacheEventDiff",
            "KvCacheRemoved",
            "KvCacheStored",
            "KvCacheStoredBlock",
            "KvCacheUpdated",
        ),
        "runtime.scheduling.block_events",
    ),
    **dict.fromkeys(
        ("InflightBatchingStatistics", "IterationStatistics", "KvCacheStatistics", "SpecDecodingStatistics"),
        "runtime.iteration_statistics",
    ),
    "read_prompt_table": "api.prompt_tables",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    except ModuleNotFoundError as error:
        from trtforge.core.extras import missing_package

        failure = missing_package(error, f"{__name__}.{name}")
        if failure is None:
            raise
        raise ImportError(f"{failure.message}. {failure.hint}") from error
