"""Text of Hugging Face hub datasets, through the `datasets` library if it is installed.

`hf:ID[@REVISION][:CONFIG[:SPLIT]]` names one; a revision is a branch, tag or commit.

Rows are streamed, so that a few hundred samples of a large dataset do not download all of it. A dataset's own code is
never run.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtforge.core.errors import ForgeError, first_line
from trtforge.core.extras import install_command

PREFIX = "hf:"
_BUFFER = 10_000  # rows in the shuffle buffer
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TEXT_FIELDS = ("text", "article", "document", "content")


@dataclass(frozen=True)
class HubData:
    """A dataset; `config` and `revision` None: the hub's default."""

    name: str
    config: str | None
    split: str
    revision: str | None = None

    @classmethod
    def parse(cls, source: str) -> "HubData":
        """Parse `hf:ID[@REVISION][:CONFIG[:SPLIT]]`. Raises ForgeError for anything else."""
        parts = source.removeprefix(PREFIX).split(":")
        name, at, revision = parts[0].partition("@")
        if not source.startswith(PREFIX) or len(parts) > 3 or not _is_repository(name) or bool(at) != bool(revision):
            raise ForgeError(
                f"{source}: not a hub dataset",
                hint="Write hf:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]], such as hf:abisee/cnn_dailymail:3.0.0:train.",
            )
        _, config, split = (*parts, "", "")[:3]
        return cls(name, config or None, split or "train", revision or None)

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.name}{at}:{self.config or ''}:{self.split}"


def _is_repository(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def pinned_to(source: str, commit: str) -> str:
    """The same data at a commit."""
    return str(replace(HubData.parse(source), revision=commit))


def commit_of(source: str) -> str:
    """The commit of the data's revision, from the hub or its local cache; a full commit hash is returned unchanged.

    Raises ForgeError if neither has it.
    """
    wanted = HubData.parse(source)
    if wanted.revision is not None and _COMMIT.fullmatch(wanted.revision):
        return wanted.revision
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            wanted.name,
            repo_type="dataset",
            revision=wanted.revision,
            allow_patterns=[".gitattributes"],  # a small file that every repository of the hub has
            token=os.getenv("HF_TOKEN"),
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ForgeError(
            f"{source}: its commit cannot be found: {first_line(error)}",
            hint="Check the id, the network and HF_TOKEN, or write hf:OWNER/NAME@COMMIT.",
        ) from None
    return Path(snapshot).name


def require_hub_data(source: str) -> None:
    """Raises ForgeError for an invalid source, or if `datasets` is not installed; the hub is not contacted."""
    HubData.parse(source)
    if find_spec("datasets") is None:
        raise _no_library(source)


def hub_rows(source: str, seed: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row's location and the row with its text under "text" (or "messages"), shuffled by `seed`.

    Raises ForgeError if `datasets` is not installed, the dataset cannot be read, or has no text field.
    """
    wanted = HubData.parse(source)
    try:
        from datasets import load_dataset
    except ImportError:
        raise _no_library(source) from None
    try:
        rows = load_dataset(
            wanted.name,
            wanted.config,
            split=wanted.split,
            revision=wanted.revision,
            streaming=True,
            token=os.getenv("HF_TOKEN"),
        ).shuffle(seed=seed, buffer_size=_BUFFER)
        for number, row in enumerate(rows):
            yield f"{source}: row {number}", _with_text(row, source)
    except (OSError, ValueError, RuntimeError) as error:
        raise ForgeError(
            f"{source} cannot be read: {first_line(error)}",
            hint="Check the id, its configuration and split, the network and HF_TOKEN, or give a local file.",
        ) from None


def _no_library(source: str) -> ForgeError:
    return ForgeError(f"{source} needs the datasets library", hint=f"Run `{install_command('hub-data')}`.")


def _with_text(row: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if isinstance(row.get("messages"), list):
        return {"messages": row["messages"]}
    for name in _TEXT_FIELDS:
        if isinstance(row.get(name), str):
            return {"text": row[name]}
    raise ForgeError(
        f"{source}: no text field among {', '.join(row)}",
        hint=f"Use a dataset with {', '.join(_TEXT_FIELDS)} or messages, or save it as JSON lines with text.",
    )
