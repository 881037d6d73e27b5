"""Prompt tables of the Python API: embeddings that a prompt contains in place of tokens."""

from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtforge.api.hints import hinted
from trtforge.core.errors import ForgeError, RequestError, first_line
from trtforge.core.json_text import read_json
from trtforge.engine_process.requests import PromptTable
from trtforge.formats.adapter import ADAPTER_CONFIG, ADAPTER_FILES
from trtforge.formats.shards import RowReader, read_header
from trtforge.models.torch_tensors import read_tensor

if TYPE_CHECKING:
    from trtforge.core.dtypes import ModelDtype

_PEFT_KINDS = ("PROMPT_TUNING", "P_TUNING")
_TENSOR = "prompt_embeddings"
_DTYPES: "dict[torch.dtype, ModelDtype]" = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def prompt_table(values: object, extra_ids: Sequence[int] = ()) -> PromptTable:
    """The table of `values` (rows, hidden size): a tensor of torch, a NumPy array, or a list of rows.

    `extra_ids`: of each token of the prompt, or none. Raises RequestError.
    """
    hint = "Give a tensor or an array (rows, hidden size) of float16, bfloat16 or float32."
    try:
        found = values.detach().cpu() if isinstance(values, torch.Tensor) else torch.from_numpy(_array(values))
        found = found.contiguous()
    except (TypeError, ValueError, RuntimeError) as error:  # for a sparse tensor, or one without data
        raise RequestError(f"prompt_table is not a table of numbers: {first_line(error)}", hint=hint) from None
    found = found.float() if found.dtype is torch.float64 else found
    if found.ndim != 2 or found.dtype not in _DTYPES:
        kind = str(found.dtype).removeprefix("torch.")
        raise RequestError(f"prompt_table is {kind} {list(found.shape)}", hint=hint)
    rows, width = found.shape
    data = found.view(torch.uint8).numpy().tobytes() if rows * width else b""
    return PromptTable(rows, width, _DTYPES[found.dtype], data, _ids(extra_ids))


def _ids(extra_ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, extra_ids))
    except TypeError as error:
        hint = "Give a whole number for each token of the prompt."
        raise RequestError(f"prompt_table_extra_ids: {error}", hint=hint) from None


def _array(values: object) -> NDArray[Any]:
    array = np.array(values)
    return array.astype(np.float32) if array.dtype.kind in "iu" else array


@hinted()
def read_prompt_table(directory: str | Path) -> torch.Tensor:
    """The virtual tokens (rows, hidden size) of a prompt tuning or p-tuning adapter that PEFT saved. Raises ForgeError.

    `PeftModel.get_prompt_embedding_to_save` in PEFT's src/peft/peft_model.py: for p-tuning, the output of its encoder.
    """
    config, path = Path(directory) / ADAPTER_CONFIG, Path(directory) / ADAPTER_FILES[1]
    for each in (config, path):
        if not each.is_file():
            raise ForgeError(f"{each} does not exist", hint="Give the directory that PEFT saved.")
    values = read_json(config, hint="Give the directory that PEFT saved.")
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind not in _PEFT_KINDS:
        raise ForgeError(
            f"{config}: peft_type is {kind!r:.60}, which has no prompt table",
            hint=f"Give an adapter of {' or '.join(_PEFT_KINDS)}.",
        )
    stored = {tensor.spec.name: tensor for tensor in read_header(path)}
    if _TENSOR not in stored:
        raise ForgeError(f"{path} has no tensor {_TENSOR}", hint="Save the adapter with PEFT again.")
    with RowReader() as reader:
        return read_tensor(reader, stored[_TENSOR])
