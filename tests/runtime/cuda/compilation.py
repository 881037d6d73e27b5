"""Compiles the Triton kernels to machine code of GPUs, without one. Run as a program: kernels must not be interpreted.

Its arguments are the GPU's SM version and whether `every` variant is compiled or only the `first` of each kernel. It
writes a line for each: the kernel, its shared memory in bytes, its registers and its spilled bytes.
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

from trtforge.runtime.cuda import (
    chunk_kernels,
    paged_kernels,
    product_kernels,
    rounding_kernels,
    step_kernels,
    tile_kernels,
)
from trtforge.runtime.cuda.paged_attention import tile_for, tile_of_rows
from trtforge.runtime.cuda.products import _row_shape_for, _shape_for

_STRIDES = [
    name
    for name in paged_kernels.attend_paged.arg_names
    if name.endswith(("_row", "_head", "_block", "_slot", "_vector", "_column"))
]
_E4M3_SM = 89  # from which GPUs convert to E4M3
_EARLY_SM = 90  # from which kernels start before the previous ones have ended
_ROWS_AND_SPLITS = ((1, 4), (16, 1), (64, 2))
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def variants(sm: int) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels with the types of their arguments and their constants."""
    e4m3 = sm >= _E4M3_SM
    return [*_attention(e4m3=e4m3), *_chunks(), *_between(e4m3=e4m3), *_products(e4m3=e4m3), *_tiles(), *_rounding()]


def _between(*, e4m3: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """What lies between products and attention."""
    numbers = dict.fromkeys(("x", "change", "weight", "total", "y", "halves", "heads", "cosines", "sines"), "*bf16")
    numbers |= {"code_scale": "*bf16"}
    numbers |= dict.fromkeys(("x_row", "x_head", "y_row", "y_head", "size", "count", "heads_row", "heads_head"), "i32")
    numbers |= dict.fromkeys(("scale", "epsilon", "factor"), "fp32") | {"positions": "*i64", "frequencies": "*fp32"}
    numbers |= {"values": "*bf16", "slots": "*i64", "storage": "*bf16", "values_row": "i32", "width": "i32"}
    placed = {
        "DIM": 64,
        "SIZE": 80,
        "SIZE_PADDED": 128,
        "HEADS": 32,
        "INTERLEAVED": False,
        "INT8": False,
        "E4M3": False,
    }
    largest = numbers | {"values": "*fp32", "places": "*i32", "chosen": "*i64", "columns": "i32", "parts": "i32"}
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (step_kernels.rms_norm, numbers, {"ADDS": True, "SIZE_PADDED": 4096}),
        (step_kernels.add, numbers, {"COLUMNS": 1024}),
        (step_kernels.scale_columns, numbers | {"factors": "*bf16"}, {"COLUMNS": 1024}),
        *((step_kernels.gate, numbers, {"ACTIVATED": 1, "KIND": kind, "COLUMNS": 1024}) for kind in range(5)),
        (step_kernels.rotate, numbers, {"DIM": 128, "HALF_PADDED": 64, "HEADS": 32, "INTERLEAVED": False}),
        (step_kernels.rotation, numbers, {"HALF": 64, "HALF_PADDED": 64, "INTERLEAVED": True}),
        (step_kernels.write_slots, numbers, {"COLUMNS": 1024, "INT8": False, "E4M3": False}),
        (step_kernels.rotate_and_write, numbers | dict.fromkeys(("queries", "rotated"), "i32"), placed),
        (step_kernels.largest_of_parts, largest | {"x": "*fp32"}, {"PARTS_PADDED": 64, "COLUMNS": 2048}),
        (step_kernels.largest_of_row, largest, {"PARTS_PADDED": 64}),
        (step_kernels.write_slots, numbers | {"storage": "*i8"}, {"COLUMNS": 1024, "INT8": True, "E4M3": False}),
    ]
    if e4m3:
        codes = numbers | {"storage": "*u8", "codes": "*fp8e4nv"}
        found.append((step_kernels.write_slots, codes, {"COLUMNS": 1024, "INT8": False, "E4M3": True}))
        found.append((step_kernels.quantize, codes | {"scale": "*fp32"}, {"COLUMNS": 1024}))
        as_codes = numbers | {"y": "*fp8e4nv", "code_scale": "*fp32"}
        found.append((step_kernels.rms_norm, as_codes, {"ADDS": True, "SIZE_PADDED": 4096}))
        found.append((step_kernels.gate, as_codes, {"ACTIVATED": 0, "KIND": 0, "COLUMNS": 1024}))
    return found


def _products(*, e4m3: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    numbers = dict.fromkeys(("x", "weight", "bias", "y", "prescale", "values"), "*bf16")
    numbers |= dict.fromkeys(("scales", "factor", "factors", "sums"), "*fp32") | {"arrived": "*i32"}
    numbers |= dict.fromkeys(("inputs", "outputs", "rows", "x_row"), "i32")
    converts = {"CONVERTS": e4m3}
    one = converts | {"SCALED": False, "FACTORED": False, "BIASED": True}
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (product_kernels.multiply_one, numbers, one | _row_shape(outputs, 2)) for outputs in (2048, 8192)
    ]
    if e4m3:
        both = numbers | {"x": "*fp8e4nv", "weight": "*u8"}
        found.append((product_kernels.multiply_one, both, one | _row_shape(8192, 1) | {"FACTORED": True}))
    for kind in ("*i8", "*u8"):
        codes = numbers | {"weight": kind}
        scaled = one | {"SCALED": True, "FACTORED": kind == "*u8"}
        found += [(product_kernels.multiply_one, codes, scaled | _row_shape(outputs, 1)) for outputs in (2048, 8192)]
        for rows, splits in _ROWS_AND_SPLITS[1:]:
            every = converts | _shape(rows) | {"INPUTS": 128, "SPLITS": splits, "FACTORED": kind == "*u8"}
            found.append((product_kernels.multiply_codes, codes, every | {"BIASED": False}))
        expanded = converts | {"COLUMNS": 1024, "SCALED": kind == "*i8"}
        found.append((product_kernels.expand_codes, codes, expanded))
        sums = numbers | {"sums": "*i32" if kind == "*i8" else "*bf16"}
        found.append((product_kernels.scale_sums, sums, {"COLUMNS": 1024, "FACTORED": True, "BIASED": True}))
    return found


def _tiles() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    numbers = dict.fromkeys(("x", "bias", "y", "prescale", "values"), "*bf16") | {"weight": "*i8", "factor": "*fp32"}
    numbers |= {"sums": "*fp32", "arrived": "*i32"}
    numbers |= dict.fromkeys(("inputs", "outputs", "rows", "x_row", "scales_group"), "i32")
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = []
    every, last = _ROWS_AND_SPLITS, _ROWS_AND_SPLITS[-1:]
    for scales, half, counts in (("*bf16", 64, every), ("*fp32", 128, last), ("*u8", 64, every), ("*u8", 16, last)):
        types, tiles = numbers | {"scales": scales}, {"TILE": 64, "HALF": half, "NVFP4": scales == "*u8"}
        for rows, splits in counts:
            sizes = tiles | _shape(rows) | {"SPLITS": splits, "ONE": rows == 1, "BIASED": False}
            found.append((tile_kernels.multiply_tiles, types, sizes | {"PRESCALED": rows == 1 and scales == "*bf16"}))
        found.append((tile_kernels.expand_tiles, types, tiles))
    return found


def _shape(rows: int) -> dict[str, Any]:
    """Of the programs that multiply codes with so many rows."""
    shape = _shape_for(rows)
    return {"OUTPUTS": shape.outputs, "ROWS": shape.rows, "warps": shape.warps, "stages": shape.stages}


def _row_shape(outputs: int, size: int) -> dict[str, Any]:
    """Of the programs that multiply one row."""
    shape = _row_shape_for(outputs, size)
    return {"OUTPUTS": shape.outputs, "INPUTS": shape.inputs, "AHEAD": shape.ahead, "warps": shape.warps}


def _rounding() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    types = dict.fromkeys(("x", "y"), "*bf16") | dict.fromkeys(("prescale", "scale", "tokens"), "*fp32")
    types |= dict.fromkeys(("x_row", "size"), "i32") | {"least": "fp32"}
    return [
        (rounding_kernels.round_rows, types, {"COLUMNS": columns, "KIND": kind, "PRESCALED": kind == 1, "BY_ROW": own})
        for kind, columns, own in ((0, 1024, False), (1, 1024, False), (2, 1024, False), (0, 4096, True))
    ]


def _attention(*, e4m3: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = []
    every = {"WINDOW": 100, "CHUNK": 64, "CAPPED": True, "BIASED": True, "SINKS": True, "SPLITS": 8, "DIM": 96}
    every |= {"TREES": True}
    none = {"WINDOW": 0, "CHUNK": 0, "CAPPED": False, "BIASED": False, "SINKS": False, "SPLITS": 1, "DIM": 0}
    none |= {"TREES": False}
    shapes = {
        "VALUES": 8,
        "BLOCK": 32,
        "INTERLEAVED": False,
    }
    ordinary = itertools.product(
        [("bf16", "bf16"), ("fp16", "u8"), ("bf16", "i8"), ("fp32", "fp32")], [(4, 128)], [none, every]
    )
    for (kind, cache), (group, size), scores in (*ordinary, (("fp32", "fp32"), (71, 64), none)):
        partial = "*fp32" if scores is every else f"*{kind}"
        types = {"queries": f"*{kind}", "cache": f"*{cache}", "tables": "*i64", "lengths": "*i64", "out": f"*{kind}"}
        types |= dict.fromkeys(("slopes", "sinks"), "*fp32" if scores is every else f"*{kind}")
        types |= {"seen_slots": "*i64" if scores is every else f"*{kind}"}
        types |= {"code_scale": f"*{kind}", "arrived": "*i32", "cosines": f"*{kind}", "sines": f"*{kind}"}
        types |= dict.fromkeys(("sums", "largest", "totals"), partial)
        types |= dict.fromkeys(("scale", "cache_scale", "cap"), "fp32") | dict.fromkeys(_STRIDES, "i32")
        tile = tile_of_rows(group, size, 4 if kind == "fp32" else 2)
        heads = {"GROUP": group, "GROUP_PADDED": tile.queries, "SIZE": size, "SIZE_PADDED": size}
        heads |= {"TOKENS": tile.tokens, "warps": tile.warps, "E4M3": cache == "u8"}
        heads |= {"DIM": 0} if cache == "u8" and not e4m3 else {}  # what is rotated is written to the cache
        found.append((paged_kernels.attend_paged, types, shapes | scores | heads))
    if e4m3:
        codes = {"out": "*fp8e4nv", "code_scale": "*fp32"}
        kernel, whole, attending = found[0]
        found.append((kernel, whole | codes, attending))
    return found


def _chunks() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Attention of chunks: of most models, of one with all that changes scores, of large heads, of few tokens."""
    names = chunk_kernels.attend_chunks.arg_names
    types = dict.fromkeys(
        (name for name in names if name.endswith(("_row", "_head", "_block", "_slot", "_vector"))), "i32"
    )
    types |= dict.fromkeys(("rows", "tables", "tiles"), "*i64") | {"arrived": "*i32"}
    types |= dict.fromkeys(("scale", "cache_scale", "cap"), "fp32")
    plain = {"VALUES": 8, "GROUP": 4, "BLOCK": 32, "SPLITS": 1, "WINDOW": 0, "CHUNK": 0, "stages": 2}
    plain |= dict.fromkeys(("CAPPED", "BIASED", "SINKS"), False)
    every = plain | {"WINDOW": 100, "CHUNK": 64, "SPLITS": 8} | dict.fromkeys(("CAPPED", "BIASED", "SINKS"), True)
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = []
    for kind, cache, scores, count, size in (
        ("bf16", "bf16", plain, 128, 128),
        ("bf16", "bf16", plain, 128, 64),
        ("bf16", "bf16", plain, 16, 128),
        ("fp16", "u8", plain, 128, 128),
        ("bf16", "i8", every, 64, 128),
        ("bf16", "bf16", every, 128, 256),
        ("fp32", "fp32", plain, 128, 64),
        ("fp32", "fp32", every, 128, 128),
        ("fp32", "fp32", plain, 128, 256),
    ):
        tile = tile_for(count, size, 4 if kind == "fp32" else 2)
        partial = "*fp32" if scores is every else f"*{kind}"
        numbers = dict.fromkeys(("slopes", "sinks"), "*fp32" if scores is every else f"*{kind}")
        numbers |= dict.fromkeys(("sums", "largest", "totals"), partial)
        numbers |= {"queries": f"*{kind}", "cache": f"*{cache}", "out": f"*{kind}"}
        shape = {"SIZE": size, "SIZE_PADDED": size, "QUERIES": tile.queries, "TOKENS": tile.tokens}
        shape |= {"warps": tile.warps}
        found.append((chunk_kernels.attend_chunks, types | numbers, scores | shape))
    return found


def first_variants(sm: int) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """One of each kernel."""
    return list({kernel.__name__: (kernel, *rest) for kernel, *rest in reversed(variants(sm))}.values())


def main(target: GPUTarget, which: str) -> None:
    """Compile `every` variant for one GPU, or the `first` of each kernel, and print what it uses."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, types, constants in {"every": variants, "first": first_variants}[which](target.arch):
        names = kernel.arg_names
        constants = constants | {"EARLY": target.arch >= _EARLY_SM}
        options = {"num_warps": constants.pop("warps", 4), "num_stages": constants.pop("stages", 3)}
        options["enable_fp_fusion"] = True
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "*i"}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, values, aligned)
        made = triton.compile(source, target=target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        usage = _USAGE.search(shown)
        assert usage is not None, shown
        print(kernel.__name__, made.metadata.shared, *usage.groups())


if __name__ == "__main__":
    main(GPUTarget("cuda", int(sys.argv[1]), 32), sys.argv[2])
