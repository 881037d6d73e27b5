"""Datasets of the Hugging Face hub as text: `hf:ID[:CONFIG[:SPLIT]]`, through the `datasets` library where it is there.

Rows are streamed, so that a few hundred samples of a large dataset do not download all of it. Code that a dataset
brings along is never run.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from trtforge.core.errors import ForgeError

PREFIX = "hf:"
_BUFFER = 10_000  # rows among which the order is random
_TEXT_FIELDS = ("text", "article", "document", "content")


@dataclass(frozen=True)
class HubData:
    """Which dataset; `config` None is its default."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, source: str) -> "HubData":
        """Of `hf:ID[:CONFIG[:SPLIT]]`. Raises ForgeError for anything else."""
        parts = source.removeprefix(PREFIX).split(":")
        if not source.startswith(PREFIX) or len(parts) > 3 or not parts[0]:
            raise ForgeError(
                f"{source}: not a dataset of the hub",
                hint="Write hf:OWNER/NAME[:CONFIG[:SPLIT]], such as hf:abisee/cnn_dailymail:3.0.0:train.",
            )
        name, config, split = (*parts, "", "")[:3]
        return cls(name, config or None, split or "train")


def require_hub_data(source: str) -> None:
    """Raises ForgeError for a source that is none, or that nothing here can read; the hub itself is not asked."""
    HubData.parse(source)
    if find_spec("datasets") is None:
        raise _no_library(source)


def hub_rows(source: str, seed: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where a row stands, and the row with its text under "text" (or "messages"), in an order that `seed` decides.

    Raises ForgeError if `datasets` is not installed, the dataset cannot be read, or has no field of text.
    """
    wanted = HubData.parse(source)
    try:
        from datasets import load_dataset
    except ImportError:
        raise _no_library(source) from None
    try:
        rows = load_dataset(
            wanted.name, wanted.config, split=wanted.split, streaming=True, token=os.getenv("HF_TOKEN")
        ).shuffle(seed=seed, buffer_size=_BUFFER)
        for number, row in enumerate(rows):
            yield f"{source}: row {number}", _with_text(row, source)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ForgeError(
            f"{source} cannot be read: {reason}",
            hint="Check the id, its configuration and split, the network and HF_TOKEN, or give a local file.",
        ) from None


def _no_library(source: str) -> ForgeError:
    return ForgeError(f"{source} needs the datasets library", hint="pip install 'trtforge[hub-data]'.")


def _with_text(row: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if isinstance(row.get("messages"), list):
        return {"messages": row["messages"]}
    for name in _TEXT_FIELDS:
        if isinstance(row.get(name), str):
            return {"text": row[name]}
    raise ForgeError(
        f"{source}: no field of text among {', '.join(row)}",
        hint=f"Datasets with {', '.join(_TEXT_FIELDS)} or messages are read; save another as JSON lines.",
    )
