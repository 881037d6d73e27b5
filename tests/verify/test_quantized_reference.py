"""A quantised checkpoint is verified against the weights that it means, whoever quantised it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.modelopt import dense, export_for_hugging_face, quantized_by_modelopt
from tests.quantized import (
    AWQ,
    GPTQ,
    Pack,
    awq,
    compressed,
    fp8_one_scale,
    fp8_rows,
    fp8_static,
    gptq,
    int8_static,
    nvfp4_divided,
    pack_quantized,
    write_quantized,
)
from tests.reference.streamed import assert_streams
from trtforge.convert.stage import ConvertConfig, convert, plan_conversion
from trtforge.core.errors import ForgeError
from trtforge.core.progress import Silent
from trtforge.core.recipe import GateConfig
from trtforge.formats.shards import read_header
from trtforge.verify.stage import verify
from trtforge.verify.tensors import check_tensors

IDS = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
SOURCES: list[Any] = [
    pytest.param(awq(), AWQ, id="awq"),
    pytest.param(gptq(), GPTQ, id="gptq"),
    pytest.param(pack_quantized, compressed("pack-quantized", "group", None), id="pack_quantized"),
    pytest.param(fp8_static(), compressed("float-quantized", "tensor", "tensor"), id="fp8"),
    pytest.param(fp8_rows, compressed("float-quantized", "channel", "token"), id="fp8_rows"),
    pytest.param(fp8_one_scale, compressed("float-quantized", "tensor", "token"), id="fp8_one_scale"),
    pytest.param(int8_static, compressed("int-quantized", "channel", "tensor"), id="int8"),
    pytest.param(nvfp4_divided, compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group"), id="nvfp4"),
]


@pytest.mark.parametrize(("pack", "values"), SOURCES)
def test_the_reference_has_the_weights_that_the_source_means(
    pack: Pack, values: dict[str, Any], tmp_path: Path
) -> None:
    source = write_quantized(tmp_path / "hf", pack, values)
    assert_streams(source.directory, source.model, IDS)


@pytest.mark.parametrize("format_", ["fp8", "int4_awq", "int8_sq", "nvfp4"])
def test_modelopts_checkpoints_too(format_: str, tmp_path: Path) -> None:
    export_for_hugging_face(quantized_by_modelopt(format_), tmp_path / "hf")
    meant = dense(load_file(tmp_path / "hf" / "model.safetensors"))
    assert_streams(tmp_path / "hf", meant, IDS, exact=False)


def test_verification_passes(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    out = convert(ConvertConfig(tp=2), source.directory, tmp_path / "out").path
    save_file({"input_ids": IDS}, tmp_path / "data.safetensors")
    gate = GateConfig(data=str(tmp_path / "data.safetensors"), samples=2, sequence_length=32, kl_mean=1e-6)
    result = verify(out, source.directory, gate)
    assert result.passed
    assert result.top1_agreement == 1.0


def test_a_scale_that_another_converter_swapped_is_found(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    out = convert(ConvertConfig(tp=2), source.directory, tmp_path / "out").path
    planned = plan_conversion(ConvertConfig(tp=2), source.directory)

    def check() -> int:
        return check_tensors(out, planned.checkpoint, planned.plan, planned.layout, Silent())

    assert check() == 2 * (2 * (5 + 2) + 3)  # scales and norms of both layers, embedding, norm and head, on both ranks
    rank = out / "rank1.safetensors"
    scales = next(t for t in read_header(rank) if t.spec.name == "transformer.layers.1.mlp.fc.weights_scaling_factor")
    with rank.open("r+b") as file:
        file.seek(scales.offset + 20)
        file.write(b"\1")
    with pytest.raises(ForgeError, match=r"transformer\.layers\.1\.mlp\.fc\.weights_scaling_factor differs from"):
        check()
