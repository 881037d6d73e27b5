"""The groups of compressed-tensors: their formats, and the modules that their targets name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.formats.test_quantized_source import (
    FP8_INPUTS,
    FP8_WEIGHTS,
    IN_FP8,
    IN_INT4,
    INT4_WEIGHTS,
    INT8_INPUTS,
    INT8_WEIGHTS,
    NVFP4_BLOCKS,
    Q_PROJ,
    compressed,
    found,
    groups,
)


@pytest.mark.parametrize(
    ("weights", "inputs", "packing", "format_"),
    [
        (FP8_WEIGHTS, FP8_INPUTS, "fp8", "fp8"),
        (FP8_WEIGHTS | {"strategy": "channel"}, FP8_INPUTS | {"strategy": "token", "dynamic": True}, "fp8_rows",
         "fp8_rowwise"),
        (FP8_WEIGHTS, FP8_INPUTS | {"strategy": "token", "dynamic": True}, "fp8_one_scale", "fp8_rowwise"),
    ],
)  # fmt: skip
def test_compressed_tensors_fp8(
    tmp_path: Path, weights: dict[str, Any], inputs: dict[str, Any], packing: str, format_: str
) -> None:
    source = found(compressed(weights, inputs), tmp_path)
    assert (source.packing, source.format) == (packing, format_)


def test_compressed_tensors_int4_with_patterns(tmp_path: Path) -> None:
    values = compressed(INT4_WEIGHTS, None, format="pack-quantized", ignore=["lm_head", r"re:.*\.1\.mlp.*"])
    source = found(values, tmp_path)
    assert (source.packing, source.format, source.group_size) == ("pack_quantized", "int4_awq", 128)
    assert source.quantizes(Q_PROJ)
    assert not source.quantizes("model.layers.1.mlp.up_proj")


def test_compressed_tensors_may_count_the_zeros_of_whole_matrices(tmp_path: Path) -> None:
    """As llm-compressor wrote it in 2024 for models that were not pruned (compressed-tensors ignores it)."""
    dense = {"format": "dense", "global_sparsity": 0.13, "sparsity_structure": "unstructured"}
    assert found(compressed(FP8_WEIGHTS, FP8_INPUTS, sparsity_config=dense), tmp_path).packing == "fp8"


def test_compressed_tensors_may_name_its_targets(tmp_path: Path) -> None:
    values = compressed(FP8_WEIGHTS, FP8_INPUTS)
    values["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn.*", "model.layers.0.mlp.up_proj"]
    source = found(values, tmp_path)
    assert source.quantizes(Q_PROJ)
    assert source.quantizes("model.layers.0.mlp.up_proj")
    assert not source.quantizes("model.layers.10.mlp.up_proj")


def test_groups_of_compressed_tensors_have_their_formats(tmp_path: Path) -> None:
    """A pattern goes before the class of a module, and what is ignored before both."""
    source = found(groups(IN_FP8, IN_INT4), tmp_path)
    assert (source.formats, source.group_size) == (("int4_awq", "fp8"), 128)
    names = [f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("up", "down")]
    formats = [each and each.format for each in map(source.of, (*names, "lm_head"))]
    assert formats == ["int4_awq", "fp8", None, "fp8", None]


def test_overlapping_targets_are_taken_as_compressed_tensors_does(tmp_path: Path) -> None:
    """Names before expressions, these in the order of their characters, then the class."""
    from compressed_tensors.utils.match import match_targets

    layer = "model.layers.0"
    int4 = [r"re:(?i).*GATE_proj", r"re:.*\.0\..*_proj", f"{layer}.self_attn.q_proj", r"re:.*mlp.*down_proj"]
    fp8 = [r"re:.*mlp\..*", "Linear", f"{layer}.mlp.up_proj", r"re:.*self_attn.[kq]_proj"]
    source = found(groups(IN_FP8 | {"targets": fp8}, IN_INT4 | {"targets": int4}), tmp_path)
    formats = set()
    for name in ("q", "k", "v", "gate", "up", "down"):
        module = f"model.layers.{0 if name in 'qk' else 2}.{'self_attn' if name in 'qkv' else 'mlp'}.{name}_proj"
        for each in (module, module.replace(".2.", ".0."), module.replace(".0.", ".2.")):
            (first, *_) = match_targets(each, torch.nn.Linear(1, 1), [*fp8, *int4])
            taken = source.of(each)
            assert taken is not None
            assert taken.format == ("int4_awq" if first in int4 else "fp8"), (each, first)
            formats.add(taken.format)
    assert formats == {"int4_awq", "fp8"}


def test_groups_of_one_scheme_are_one(tmp_path: Path) -> None:
    attention, mlp = ({**IN_FP8, "targets": [rf"re:.*{name}.*"]} for name in ("self_attn", "mlp"))
    source = found(groups(attention, mlp), tmp_path)
    assert (source.format, source.mixed, source.others) == ("fp8", False, ())
    assert source.quantizes(Q_PROJ)
    assert source.quantizes("model.layers.0.mlp.up_proj")
    assert not source.quantizes("model.layers.1.mlp.up_proj")


@pytest.mark.parametrize(
    ("weights", "inputs", "form", "packing", "format_"),
    [
        (INT8_WEIGHTS, INT8_INPUTS, "int-quantized", "int8_rows", "int8_sq"),
        (INT8_WEIGHTS, INT8_INPUTS, "naive-quantized", "int8_rows", "int8_sq"),
        (NVFP4_BLOCKS, NVFP4_BLOCKS | {"dynamic": "local"}, "nvfp4-pack-quantized", "nvfp4", "nvfp4"),
    ],
)
def test_compressed_tensors_int8_and_nvfp4(
    tmp_path: Path, weights: dict[str, Any], inputs: dict[str, Any], form: str, packing: str, format_: str
) -> None:
    source = found(compressed(weights, inputs, format=form), tmp_path)
    assert (source.packing, source.format, source.divisors) == (packing, format_, format_ == "nvfp4")
