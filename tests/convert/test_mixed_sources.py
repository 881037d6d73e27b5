"""Sources in mixed precision: every layer keeps its format, in the checkpoint, its plan and its engines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.modelopt import dense, export_for_hugging_face, quantized_by_modelopt
from tests.plan.models import asked
from tests.quantized import compressed, fp8_static, pack_quantized, write_quantized
from tests.reference.streamed import assert_streams
from tests.runtime.converted import computed
from tests.runtime.test_quantized_sources import TOKENS, assert_computes, by_tensor, logits, relative
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig, GateConfig
from trtforge.formats.shards import read_header
from trtforge.pipeline.description import describe
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model
from trtforge.verify.stage import verify

ALGORITHMS = {"int4_awq": "W4A16_AWQ", "nvfp4": "NVFP4"}


def on(backend: str) -> dict[str, Any]:
    """A recipe's engine."""
    return {"engine": {"backend": backend}}


FORMATS = pytest.mark.parametrize("format_", ALGORITHMS)
Exports = dict[str, Path]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Of each format a Llama with attention in FP8, whose first down_proj is not quantised."""
    made = {}
    for format_ in ALGORITHMS:
        made[format_] = tmp_path_factory.mktemp(format_)
        export_for_hugging_face(quantized_by_modelopt(format_, fp8_attention=True), made[format_])
    return made


@FORMATS
def test_every_layer_has_its_own_format(exports: Exports, format_: str, tmp_path: Path) -> None:
    out = assert_computes(exports[format_], tmp_path / "out", tp=2)
    quantization = json.loads((out / "config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "MIXED_PRECISION"
    layers = json.loads((out / "quant_cfg.json").read_text())["quantized_layers"]
    attention = {f"transformer.layers.{n}.attention.{name}": "FP8" for n in range(2) for name in ("qkv", "dense")}
    mlp = {f"transformer.layers.{n}.mlp.{name}": ALGORITHMS[format_] for n in range(2) for name in ("fc", "gate")}
    last = {"transformer.layers.1.mlp.proj": ALGORITHMS[format_]}
    assert {name: layer["quant_algo"] for name, layer in layers.items()} == attention | mlp | last
    rank = load_file(out / "rank1.safetensors")
    assert rank["transformer.layers.0.attention.qkv.weight"].dtype == torch.float8_e4m3fn
    assert rank["transformer.layers.0.mlp.fc.weight"].element_size() == 1
    assert rank["transformer.layers.0.mlp.proj.weight"].dtype == torch.float32


@FORMATS
def test_its_engine_computes_what_the_checkpoint_does(exports: Exports, format_: str, tmp_path: Path) -> None:
    out = convert(ConvertConfig(dtype="float32"), exports[format_], tmp_path / "out").path
    engine = EngineConfig.parse({"backend": "torch", "max_batch_size": 2, "max_seq_len": 64}, "test")
    made = compile_engine(engine, out, tmp_path / "engine").path
    assert relative(computed(made, TOKENS)[0], computed(out, TOKENS)[0]) < 5e-3


@FORMATS
def test_verification_reads_every_format(exports: Exports, format_: str, tmp_path: Path) -> None:
    """The tensors that are copied bit for bit: scales, norms, embedding, head and what is not quantised."""
    meant = dense(load_file(exports[format_] / "model.safetensors"))
    assert_streams(exports[format_], meant, torch.tensor([TOKENS]), exact=False)
    out = convert(ConvertConfig(tp=2), exports[format_], tmp_path / "out").path
    save_file({"input_ids": torch.tensor([TOKENS])}, tmp_path / "data.safetensors")
    gate = GateConfig(data=str(tmp_path / "data.safetensors"), samples=1, sequence_length=len(TOKENS))
    assert verify(out, exports[format_], gate).tensors_checked > 2 * (2 * 2 + 3)


def test_single_layers_in_nvfp4_come_back_for_the_llm_api(exports: Exports, tmp_path: Path) -> None:
    """Under the names, and with the bytes, that ModelOpt exported; q, k and v share a scale in between."""
    checkpoint = convert(ConvertConfig(tp=2), exports["nvfp4"], tmp_path / "out").path
    engine = EngineConfig.parse({"backend": "llmapi", "max_batch_size": 2, "max_seq_len": 64}, "test")
    made = compile_engine(engine, checkpoint, tmp_path / "engine").path
    found, source = load_file(made / "model.safetensors"), load_file(exports["nvfp4"] / "model.safetensors")
    assert {name for name in source if not name.endswith(("k_scale", "v_scale"))} <= found.keys()
    mlp = [name for name in source if ".mlp." in name and found[name].dtype is source[name].dtype]
    assert sum(name.endswith(".weight_scale_2") for name in mlp) == 5
    assert all(torch.equal(found[name].view(-1), source[name].view(-1)) for name in mlp)
    written = json.loads((made / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"]
    given = json.loads((exports["nvfp4"] / "hf_quant_config.json").read_text())["quantization"]["quantized_layers"]
    assert {name: layer["quant_algo"] for name, layer in written.items()} == {
        name: layer["quant_algo"] for name, layer in given.items()
    }
    assert written["model.layers.1.mlp.down_proj"] == {"quant_algo": "NVFP4", "group_size": 16}


@FORMATS
def test_planned_weights_are_those_that_are_written(exports: Exports, format_: str, tmp_path: Path) -> None:
    model = find_model(str(exports[format_]))
    found = evaluate(model, asked(model, tp=2))
    assert (found.problems, model.stored is not None and model.stored.formats) == ((), (format_, "fp8"))
    out = convert(ConvertConfig(tp=2), exports[format_], tmp_path / "out").path
    assert found.memory is not None
    written = sum(tensor.spec.nbytes for tensor in read_header(out / "rank0.safetensors"))
    assert [stage.weights for stage in found.memory.stages] == [written]


@pytest.mark.parametrize(
    ("options", "rule", "message"),
    [
        ({"recipe": on("tensorrt_llm")}, "mixed_precision", "engines of mixed precision are not supported"),
        (
            {"recipe": {"engine": {"backend": "llmapi", "target": {"tensorrt_llm": "1.1.0"}}}},
            "mixed_precision",
            "TensorRT-LLM 1.1.0 is not known to run single layers in FP8",
        ),
        ({"recipe": on("torch"), "pp": 2}, "exclude_modules", "in the 2 pipeline stages"),
        ({"recipe": on("torch"), "quant": "fp8"}, "format", "ModelOpt made it nvfp4 and fp8, not fp8"),
    ],
)
def test_what_no_backend_runs_is_in_the_plan(
    exports: Exports, options: dict[str, Any], rule: str, message: str
) -> None:
    model = find_model(str(exports["nvfp4"]))
    found = {problem.rule: problem.message for problem in evaluate(model, asked(model, **options)).problems}
    assert message in found[rule]


def test_every_format_is_held_against_the_gpu(exports: Exports) -> None:
    model = find_model(str(exports["int4_awq"]))
    problems = evaluate(model, asked(model, recipe=on("tensorrt_llm"), gpu="a100-80gb")).problems
    assert ["fp8 needs 8.9" in problem.message for problem in problems if problem.rule == "gpu_format"] == [True]
    assert evaluate(model, asked(model, recipe=on("torch"), gpu="a100-80gb")).problems == ()


def test_pipeline_stages_are_refused(exports: Exports, tmp_path: Path) -> None:
    """Layer numbers start at 0 in each stage, and quant_cfg.json is one for all."""
    described = json.loads((exports["nvfp4"] / "hf_quant_config.json").read_text())
    del described["quantization"]["quantized_layers"]["model.layers.1.mlp.down_proj"]
    for path in exports["nvfp4"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    model = find_model(str(tmp_path))
    found = [problem.message for problem in evaluate(model, asked(model, recipe=on("torch"), pp=2)).problems]
    assert any(message.startswith("mixed precision in 2 pipeline stages") for message in found)


def test_inspect_names_every_format(exports: Exports) -> None:
    assert [each["format"] for each in describe(exports["nvfp4"], tensors=False)["formats"]] == ["nvfp4 and fp8"]


def test_groups_of_compressed_tensors(tmp_path: Path) -> None:
    """INT4 in the FFN, FP8 elsewhere."""
    int4, fp8 = compressed("pack-quantized", "group", None), compressed("float-quantized", "tensor", "tensor")
    groups = {
        "group_0": fp8["config_groups"]["group_0"] | {"format": "float-quantized"},
        "group_1": int4["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": ["re:.*mlp.*"]},
    }

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return (pack_quantized if "mlp" in module else fp8_static())(module, weight)

    source = write_quantized(tmp_path / "hf", pack, fp8 | {"format": "mixed-precision", "config_groups": groups})
    out = convert(ConvertConfig(tp=2), source.directory, tmp_path / "out").path
    layers = json.loads((out / "quant_cfg.json").read_text())["quantized_layers"]
    assert {name: layer["quant_algo"] for name, layer in layers.items() if ".layers.1." in name} == {
        "transformer.layers.1.attention.qkv": "FP8",
        "transformer.layers.1.attention.dense": "FP8",
        "transformer.layers.1.mlp.fc": "W4A16_AWQ",
        "transformer.layers.1.mlp.gate": "W4A16_AWQ",
        "transformer.layers.1.mlp.proj": "W4A16_AWQ",
    }

    def rounded(name: str, values: Tensor) -> Tensor:
        return values if "mlp" in name else by_tensor(name, values)

    (made,) = computed(out, TOKENS)
    assert relative(made, logits(source.model, rounded)) < 5e-3


def test_layers_that_are_joined_must_have_one_format(exports: Exports, tmp_path: Path) -> None:
    for path in exports["nvfp4"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    described = json.loads((tmp_path / "hf_quant_config.json").read_text())
    name = "model.layers.1.mlp.up_proj"
    described["quantization"]["quantized_layers"][name] = {"quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    with pytest.raises(ForgeError, match=rf"gate_proj is nvfp4, {name} is fp8: TensorRT-LLM has one format for them"):
        convert(ConvertConfig(), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
