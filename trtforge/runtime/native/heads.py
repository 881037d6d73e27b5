"""Per-head matrix products, and copies of parts of heads, by the kernels (source/heads.cpp)."""

from torch import Tensor

from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.structures import HeadProducts


def project_heads(kernels: Native, x: Tensor, weight: Tensor, y: Tensor) -> None:
    """y (rows, heads, outputs) = x (rows, heads, inputs) times each head's matrix.

    weight: contiguous (heads, inputs, outputs). x and y may be slices; a head's elements must be contiguous.
    """
    given = HeadProducts(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        rows=len(x),
        heads=len(weight),
        inputs=weight.shape[1],
        outputs=weight.shape[2],
        x_row=x.stride(0),
        x_head=x.stride(1),
        y_row=y.stride(0),
        y_head=y.stride(1),
    )
    kernels.run("project_heads", TYPES[x.dtype], given)


def copy_heads(kernels: Native, x: Tensor, into: Tensor) -> None:
    """into = x, both (rows, heads, size); both may be slices, but a head's elements must be contiguous."""
    rows, heads, size = x.shape
    element = x.element_size()
    strides = (stride * element for tensor in (x, into) for stride in tensor.stride()[:2])
    kernels.run("copy_heads", x.data_ptr(), into.data_ptr(), rows, heads, size * element, *strides)
