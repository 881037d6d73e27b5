"""LoRA adapters of single-token rows by the kernels (source/adapters.cpp)."""

from typing import NamedTuple

from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.structures import Adapters


class Matrices(NamedTuple):
    """A linear layer's adapters: A (adapters, modules, rank, inputs) and B (adapters, rank, outputs of all modules).

    `ranks`: int64 (adapters, modules), each module's rank; later rows of both its matrices are zeros.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor


def add_adapters(kernels: Native, x: Tensor, matrices: Matrices, columns: Tensor, slots: Tensor, y: Tensor) -> None:
    """y += (x A^T) B of each module, with the matrices of each row's adapter: x (rows, inputs), y (rows, outputs).

    int64 `columns` (modules, 2): the first column of y that a module changes, and the number of columns; int64 `slots`
    (rows,): the number of each row's adapter, -1 for none.
    """
    x = x.contiguous()
    a, b, ranks = matrices
    given = Adapters(
        x=x.data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        y=y.data_ptr(),
        slots=slots.data_ptr(),
        ranks=ranks.data_ptr(),
        modules=columns.data_ptr(),
        rows=len(slots),
        count=len(columns),
        inputs=a.shape[3],
        outputs=b.shape[2],
        rank=b.shape[1],
        stride=y.stride(0),
    )
    kernels.run("add_adapters", TYPES[x.dtype], given)
