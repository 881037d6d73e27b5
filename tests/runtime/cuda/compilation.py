"""Compiles the Triton kernels to machine code of GPUs, without one. Run as a program: kernels must not be interpreted.

It writes a line for each variant: the kernel, its shared memory in bytes, its registers and its spilled bytes.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trtforge.runtime.cuda import paged_kernels

_STRIDES = [
    name
    for name in paged_kernels.attend_paged.arg_names
    if name.endswith(("_row", "_head", "_block", "_slot", "_vector", "_column"))
]
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def variants() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels with the types of their arguments and their constants."""
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = []
    every = {"WINDOW": 100, "CHUNK": 64, "CAPPED": True, "BIASED": True, "SINKS": True, "SPLITS": 8}
    none = {"WINDOW": 0, "CHUNK": 0, "CAPPED": False, "BIASED": False, "SINKS": False, "SPLITS": 1}
    shapes = {"VALUES": 8, "GROUP": 4, "GROUP_PADDED": 16, "SIZE": 128, "SIZE_PADDED": 128, "BLOCK": 32, "TOKENS": 64}
    for (kind, cache), scores in itertools.product(
        [("bf16", "bf16"), ("fp16", "u8"), ("bf16", "i8"), ("fp32", "fp32")], [none, every]
    ):
        partial = "*fp32" if scores is every else f"*{kind}"
        types = {"queries": f"*{kind}", "cache": f"*{cache}", "tables": "*i64", "lengths": "*i64", "out": f"*{kind}"}
        types |= dict.fromkeys(("slopes", "sinks"), "*fp32" if scores is every else f"*{kind}")
        types |= dict.fromkeys(("sums", "largest", "totals"), partial)
        types |= dict.fromkeys(("scale", "cache_scale", "cap"), "fp32") | dict.fromkeys(_STRIDES, "i32")
        wide = {"TOKENS": 32} if kind == "fp32" else {}
        found.append((paged_kernels.attend_paged, types, shapes | scores | {"E4M3": cache == "u8"} | wide))
    types = dict.fromkeys(("sums", "largest", "totals", "sinks"), "*fp32") | {"out": "*bf16", "out_row": "i32"}
    constants = {"SIZE": 96, "SIZE_PADDED": 128, "SPLITS": 32, "SINKS": True}
    return [*found, (paged_kernels.combine_splits, types, constants)]


def main(target: GPUTarget) -> None:
    """Compile every variant for one GPU and print what it uses."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, types, constants in variants():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        made = triton.compile(source, target=target)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        usage = _USAGE.search(shown)
        assert usage is not None, shown
        print(kernel.__name__, made.metadata.shared, *usage.groups())


if __name__ == "__main__":
    main(GPUTarget("cuda", int(sys.argv[1]), 32))
