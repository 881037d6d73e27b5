"""Loading safetensors files with the safetensors library, after `shards` has checked their headers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.core.errors import ForgeError
from trtforge.formats.shards import read_header

if TYPE_CHECKING:
    from torch import Tensor

_AGAIN = "Make the directory again."


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """All tensors of a file, on the CPU. Raises ForgeError naming the file for one that is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    read_header(path)
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise ForgeError(f"{path}: not readable: {error}", hint=_AGAIN) from None


def map_tensors(path: Path) -> Any:
    """safetensors' `safe_open` of a file: tensors are memory-mapped. Raises ForgeError as `load_tensors` does."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        hint = "The directory is incomplete, or for another parallel layout."
        raise ForgeError(f"{path} is missing", hint=hint)
    read_header(path)
    try:
        return safe_open(str(path), "pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ForgeError(f"{path}: not readable: {error}", hint=_AGAIN) from None
