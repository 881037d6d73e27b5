"""Adopting what others made: what is checked, what is refused, what is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import DEMO_MODEL
from tests.golden.make_hf import write_case
from tests.package.engines import engine_config
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Identity, Stage, open_artifact
from trtforge.core.recipe import EngineConfig, GateConfig
from trtforge.formats.foreign import checkpoint_manifest
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.pipeline import adoption
from trtforge.pipeline.adoption import adopt
from trtforge.verify.stage import verify

GOLDEN = Path(__file__).parent.parent / "golden" / "expected"
RANK = "rank0.safetensors"
QKV = "transformer.layers.0.attention.qkv"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model for two ranks, without what only trtforge writes."""
    out = tmp_path_factory.mktemp("plain") / "checkpoint"
    convert(ConvertConfig(tp=2, quant="int8_wo"), DEMO_MODEL, out)
    (out / "forge.json").unlink()
    shutil.rmtree(out / "source")
    return out


@pytest.fixture
def foreign(plain: Path, tmp_path: Path) -> Path:
    shutil.copytree(plain, tmp_path / "foreign")
    return tmp_path / "foreign"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scaling factors."""
    root = tmp_path_factory.mktemp("scaled")
    convert(ConvertConfig(quant="fp8_rowwise"), DEMO_MODEL, root / "checkpoint")
    (root / "checkpoint" / "forge.json").unlink()
    return root / "checkpoint"


def test_what_is_adopted_is_an_artifact_as_any_other(foreign: Path, tmp_path: Path) -> None:
    config = EngineConfig(backend="torch", max_seq_len=64)
    before = compile_engine(config, foreign, tmp_path / "engine")
    found = adopt(foreign)
    assert found.manifest == open_artifact(foreign, "checkpoint") == checkpoint_manifest(foreign)
    assert sorted(found.manifest.files)[:3] == ["config.json", RANK, "rank1.safetensors"]
    assert found.manifest.identity.inputs == {}
    assert found.tensors == 2 * len(load_file(foreign / RANK))
    assert found.next_command == f"trtforge compile {foreign} ENGINE"
    warnings: list[str] = []
    after = compile_engine(config, foreign, tmp_path / "engine", warn=warnings.append)
    assert (after.origin, after.manifest) == ("already right", before.manifest)
    assert not any("foreign" in warning for warning in warnings)
    gate = {"data": str(DEMO_MODEL / "heldout.txt"), "samples": 1, "sequence_length": 16}
    result = verify(foreign, DEMO_MODEL, GateConfig.model_validate(gate))
    assert "the digests of its source are not recorded" in result.notes[0]


def test_what_its_files_do_not_tell_is_said(foreign: Path) -> None:
    values = json.loads((foreign / "config.json").read_text())
    del values["rotary_base"]
    (foreign / "config.json").write_text(json.dumps(values | {"version": "0.17.0"}))
    shutil.rmtree(foreign / "tokenizer")
    found = adopt(foreign)
    assert found.manifest.identity.versions == {"tensorrt_llm": "0.17.0"}
    assert [text.partition(":")[0] for text in found.unknown] == [
        "the model that it was made from",
        "rotary_base",
        "its tokenizer",
    ]


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def _as(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def _poisoned(index: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(f"{QKV}.weight"), rf"{RANK}: {QKV}.weight is missing"),
        (lambda tensors: tensors | {"transformer.other": torch.ones(2)}, "1 unexpected tensors: transformer.other"),
        (_as(f"{QKV}.weight", lambda t: t[:-2].clone()), rf"{QKV}.weight has shape .* is expected"),
        (_as(f"{QKV}.weight", lambda t: t.view(torch.int16)), rf"{QKV}.weight is int16, float16 or bfloat16 or float"),
        (_as(f"{QKV}.weight", lambda t: t.double()), rf"{QKV}.weight is float64, float16 or bfloat16 or float32"),
    ],
)
def test_tensors_that_contradict_config_json_are_refused(
    foreign: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    save_file(change(load_file(foreign / RANK)), foreign / RANK)
    with pytest.raises(ForgeError, match=message):
        adopt(foreign)
    assert not (foreign / "forge.json").exists()


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (3, float("nan"), "holds NaN at element 3"),
        (5, float("inf"), "holds an infinity at element 5"),
        (0, -1.0, "holds -1, a scaling factor is zero or more"),
    ],
)
def test_scaling_factors_that_are_none_are_refused(
    scaled: Path, tmp_path: Path, index: int, value: float, message: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(scaled, bad)
    name = "transformer.layers.1.mlp.proj.per_channel_scale"
    save_file(_as(name, _poisoned(index, value))(load_file(bad / RANK)), bad / RANK)
    with pytest.raises(ForgeError, match=rf"{RANK}: {name} {message}"):
        adopt(bad)
    assert not (bad / "forge.json").exists()


def test_weights_that_are_not_finite_are_said(foreign: Path) -> None:
    name = "transformer.ln_f.weight"
    save_file(_as(name, _poisoned(2, float("inf")))(load_file(foreign / RANK)), foreign / RANK)
    assert f"{RANK}: {name} holds an infinity at element 2" in adopt(foreign).unknown[-1]


def test_an_activation_scale_of_zero_is_refused(scaled: Path, tmp_path: Path) -> None:
    """Activations are divided by it. A checkpoint with an INT8 KV cache has such a scale too."""
    bad = tmp_path / "bad"
    shutil.copytree(scaled, bad)
    values = json.loads((bad / "config.json").read_text())
    values["quantization"] |= {"kv_cache_quant_algo": "INT8"}
    (bad / "config.json").write_text(json.dumps(values))
    scales = {f"transformer.layers.{layer}.attention.kv_cache_scaling_factor": torch.ones(1) for layer in range(4)}
    save_file(load_file(bad / RANK) | scales, bad / RANK)
    assert adopt(bad).tensors == len(load_file(bad / RANK))
    (bad / "forge.json").unlink()
    save_file(load_file(bad / RANK) | {next(iter(scales)): torch.zeros(1)}, bad / RANK)
    with pytest.raises(ForgeError, match=r"layers.0.attention.kv_cache_scaling_factor holds 0, .* is positive"):
        adopt(bad)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 1}}, "mapping: world_size 4 is not tp 2 x pp 1 x cp 1"),
        ({"mapping": {"world_size": 3, "tp_size": 3, "pp_size": 1}}, "tp_size 3 does not divide 8 attention heads"),
        ({"mapping": {"world_size": 6, "tp_size": 2, "pp_size": 3}}, "pp_size 3 does not divide 4 layers"),
        ({"mapping": {"tp_size": 1, "pp_size": 1}}, "unexpected file .*rank1.safetensors: config.json says 1 rank "),
        ({"mapping": {"tp_size": 2, "pp_size": 2}}, "rank2.safetensors is missing"),
        ({"hidden_size": "many"}, "config.json: hidden_size: Input should be a valid integer"),
    ],
)
def test_a_layout_that_is_not_that_of_the_files_is_refused(foreign: Path, values: Any, message: str) -> None:
    stated = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(stated | values))
    with pytest.raises(ForgeError, match=message):
        adopt(foreign)
    assert not (foreign / "forge.json").exists()


def test_a_network_that_the_embedded_engine_lacks_is_adopted_unchecked(foreign: Path) -> None:
    values = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(values | {"architecture": "ChatGLMForCausalLM"}))
    found = adopt(foreign)
    assert found.tensors == 0
    assert any(text.startswith("whether its tensors are those of its network") for text in found.unknown)


def test_what_was_adopted_is_never_replaced(foreign: Path) -> None:
    adopt(foreign)
    before = (foreign / RANK).read_bytes()
    for force in (False, True):
        with pytest.raises(ForgeError, match="was adopted, not written by trtforge: it is not replaced"):
            convert(ConvertConfig(), DEMO_MODEL, foreign, force=force)
    assert (foreign / RANK).read_bytes() == before


@pytest.mark.parametrize("name", ["quant_cfg.json", "carried.safetensors", "source/config.json"])
def test_every_file_that_is_read_is_digested(foreign: Path, name: str) -> None:
    without = checkpoint_manifest(foreign).digest
    (foreign / name).parent.mkdir(exist_ok=True)
    (foreign / name).write_text("{}")
    found = checkpoint_manifest(foreign)
    assert name in found.files
    (foreign / name).write_text("{ }")
    assert len({without, found.digest, checkpoint_manifest(foreign).digest}) == 3


@pytest.mark.parametrize(
    ("stage", "command"),
    [("repository", "trtforge serve {}"), ("verification", None), ("engine", "trtforge package {} REPOSITORY")],
)
def test_what_has_a_manifest_is_followed_by_what_takes_it(tmp_path: Path, stage: Stage, command: str | None) -> None:
    own = produce(tmp_path / "own", Identity(stage=stage), lambda directory: {}).path
    assert adopt(own).next_command == (command and command.format(own))


def test_adopting_again_changes_nothing(foreign: Path, tmp_path: Path) -> None:
    adopt(foreign)
    before = (foreign / "forge.json").read_bytes()
    assert adopt(foreign).already
    assert (foreign / "forge.json").read_bytes() == before
    convert(ConvertConfig(), DEMO_MODEL, tmp_path / "own")
    own = adopt(tmp_path / "own")
    assert own.already
    assert "foreign" not in own.manifest.identity.config


def test_a_change_after_adoption_is_refused(foreign: Path) -> None:
    adopt(foreign)
    with (foreign / RANK).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(ForgeError, match=r"forge\.json that its files contradict: .* was changed") as refused:
        adopt(foreign)
    assert (
        refused.value.hint == f"If the change is meant, delete {foreign / 'forge.json'} and adopt the directory again."
    )


def test_a_directory_that_cannot_be_written_is_said(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(adoption, "replace_text", refuse)
    with pytest.raises(ForgeError, match=r"forge.json: cannot be written: Permission denied"):
        adopt(foreign)


def test_other_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="is a Hugging Face checkpoint"):
        adopt(DEMO_MODEL)
    with pytest.raises(ForgeError, match="no such directory"):
        adopt(tmp_path / "none")
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "config.pbtxt").write_text('name: "ensemble"\n')
    with pytest.raises(ForgeError, match="is not a trtforge checkpoint") as refused:
        adopt(tmp_path)
    assert "trtforge migrate" in (refused.value.hint or "")


def test_the_llm_api_needs_the_model_of_a_foreign_checkpoint(tmp_path: Path) -> None:
    foreign = convert(ConvertConfig(), DEMO_MODEL, tmp_path / "foreign").path
    (foreign / "forge.json").unlink()
    shutil.rmtree(foreign / "source")
    with pytest.raises(ForgeError, match=r"lacks source/config\.json") as refused:
        compile_engine(EngineConfig(backend="llmapi"), foreign, tmp_path / "engine", CompileOptions())
    assert refused.value.hint == "trtforge did not write it: give the Hugging Face checkpoint that it was made from."


def cases() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.json"))


@pytest.mark.parametrize("case", cases())
def test_checkpoints_of_tensorrt_llms_converters_are_taken(case: str, tmp_path: Path) -> None:
    """config.json as its converter wrote it, and the tables that it dumps beside the weights."""
    golden = json.loads((GOLDEN / f"{case}.json").read_text())
    recorded = list(golden["layouts"].values())[-1]
    wanted = recorded["config"]
    source = write_case(golden["hf"], tmp_path / "hf")
    layout = {
        "tp": wanted["mapping"]["tp_size"],
        "pp": wanted["mapping"]["pp_size"],
        "ep": wanted["mapping"].get("moe_ep_size", 1),
        "dtype": wanted["dtype"],
        "parallel_embedding": wanted["use_parallel_embedding"],
        "embedding_sharding_dim": wanted["embedding_sharding_dim"],
    }
    checkpoint = convert(ConvertConfig.model_validate(layout), source, tmp_path / "checkpoint").path
    (checkpoint / "forge.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(wanted))
    tables = 0
    for rank, tensors in enumerate(recorded["ranks"]):
        path = checkpoint / f"rank{rank}.safetensors"
        written = load_file(path)
        more = {name: torch.zeros(shape) for name, (_, shape, _) in tensors.items() if name not in written}
        tables += len(more)
        save_file(written | more, path)
    if case in ("gpt_neox", "opt"):
        # Its config.json has no intermediate_size, and TensorRT-LLM takes 4 x hidden_size, which these models have not.
        with pytest.raises(ForgeError, match=r"mlp\.fc\.weight has shape \(32, 64\), \(64, 64\) is expected"):
            adopt(checkpoint)
        return
    found = adopt(checkpoint)
    assert found.tensors == sum(map(len, recorded["ranks"]))
    assert (tables > 0) == (wanted["position_embedding_type"].startswith("rope") and not case.startswith("gemma"))


@pytest.mark.parametrize(("tp", "missing"), [(2, None), (2, "rank1.engine")])
def test_an_engine_of_trtllm_build(tmp_path: Path, tp: int, missing: str | None) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(json.dumps(engine_config(tp=tp)))
    for rank in range(tp):
        if f"rank{rank}.engine" != missing:
            (engine / f"rank{rank}.engine").write_bytes(b"plan" * 25)
    if missing:
        with pytest.raises(ForgeError, match=missing):
            adopt(engine)
        assert not (engine / "forge.json").exists()
        return
    before = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository")
    found = adopt(engine)
    after = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository")
    assert (after.origin, after.manifest) == ("already right", before.manifest)
    assert found.manifest == open_artifact(engine, "engine")
    assert found.manifest.identity.versions == {"tensorrt_llm": "1.2.1"}
    assert found.unknown[:2] == (
        "the checkpoint that it was built from",
        "the GPU, compute capability and TensorRT that it was built for",
    )
    assert found.next_command == f"trtforge package {engine} REPOSITORY"
