"""Byte for byte what TensorRT-LLM's own converter wrote."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.golden.make_hf import write_case
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.formats.shards import RowReader, read_header

GOLDEN = Path(__file__).parent.parent / "golden"
TABLES = ("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq")
NOT_WRITTEN = {
    "runtime_defaults": "a default that other releases do not know",
    "residual_mlp": "a default", "disable_weight_only_quant_plugin": "a default", "load_model_on_cpu": "a default",
    "remove_duplicated_kv_heads": "a default", "fc_after_embed": "a default", "layer_idx_offset": "a default",
    "use_input_layernorm_in_first_layer": "a default", "use_last_layernorm": "a default", "num_labels": "a default",
    "partial_rotary_factor": "Phi: a default of the HF class that rotary_pct contradicts",
}  # fmt: skip
"""Fields of the recorded config.json that we leave out, and why."""


def layouts() -> list[tuple[str, str]]:
    cases = sorted((GOLDEN / "expected").glob("*.json"))
    return [(case.stem, layout) for case in cases for layout in json.loads(case.read_text())["layouts"]]


def tensors_of(path: Path) -> dict[str, list[object]]:
    """As the golden files record them: dtype, shape and the digest of the bytes."""
    found = {}
    with RowReader() as reader:
        for tensor in read_header(path):
            data = reader.read(tensor, 0, tensor.spec.shape[0], memoryview(bytearray(tensor.spec.nbytes)))
            digest = hashlib.sha256(data).hexdigest()[:32]
            found[tensor.spec.name] = [tensor.spec.dtype.safetensors, list(tensor.spec.shape), digest]
    return found


@pytest.mark.parametrize(("case", "layout"), layouts())
def test_checkpoint_equals_tensorrt_llms(case: str, layout: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "expected" / f"{case}.json").read_text())
    expected = golden["layouts"][layout]
    source = write_case(golden["hf"], tmp_path / "hf")
    mapping = expected["config"]["mapping"]
    config = ConvertConfig(
        tp=mapping["tp_size"],
        pp=mapping["pp_size"],
        ep=mapping.get("moe_ep_size", 1),
        dtype=expected["config"]["dtype"],
        parallel_embedding=expected["config"]["use_parallel_embedding"],
        embedding_sharding_dim=expected["config"]["embedding_sharding_dim"],
    )

    out = convert(config, source, tmp_path / "checkpoint").path

    written = json.loads((out / "config.json").read_text())
    assert comparable(written, expected["config"]) == comparable(expected["config"], expected["config"])
    assert sorted(p.name for p in out.glob("rank*")) == [f"rank{r}.safetensors" for r in range(len(expected["ranks"]))]
    for rank, tensors in enumerate(expected["ranks"]):
        wanted = {name: value for name, value in tensors.items() if name.rpartition(".")[2] not in TABLES}
        if golden["hf"] == "nemotron":
            wanted |= norms_of(expected["ranks"][rank // mapping["tp_size"] * mapping["tp_size"]])
        assert tensors_of(out / f"rank{rank}.safetensors") == wanted


def norms_of(tensors: dict[str, Any]) -> dict[str, Any]:
    """The gains in a rank's record."""
    return {name: value for name, value in tensors.items() if name.endswith(("layernorm.weight", "ln_f.weight"))}


def test_nemotron_norms_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """TensorRT-LLM's converter adds the one in place, once more for each rank that it writes: rank r gets w + r + 1."""
    source = write_case("nemotron", tmp_path / "hf")
    recorded = json.loads((GOLDEN / "expected" / "nemotron.json").read_text())["layouts"]["tp4pp1"]["ranks"]
    name = "transformer.layers.0.input_layernorm.weight"
    original = load_file(source / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    gain = original
    for rank in range(4):
        gain = gain + 1
        assert recorded[rank][name][2] == hashlib.sha256(gain.view(torch.uint8).numpy()).hexdigest()[:32]

    out = convert(ConvertConfig(tp=4), source, tmp_path / "checkpoint").path

    for rank in range(4):
        assert torch.equal(load_file(out / f"rank{rank}.safetensors")[name], original + 1)


def comparable(config: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """The recorded fields that carry meaning; of nested objects those that 0.17 to 1.2 all accept."""
    values = {key: config.get(key) for key in recorded if key not in NOT_WRITTEN}
    for key in ("mapping", "quantization"):
        values[key] = {name: values[key].get(name) for name in recorded[key] if recorded[key][name] is not None}
    values["quantization"].pop("smoothquant_val", None)
    moe = values.pop("moe", None)
    if moe and moe["num_experts"]:
        values["moe"] = {name: value for name, value in moe.items() if name != "topk_method"}
    return values
