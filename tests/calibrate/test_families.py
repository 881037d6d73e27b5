"""Layer streaming computes what `transformers` computes: the same largest inputs, in every family."""

from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.families import TINY
from trtforge.calibrate.layer import Needs
from trtforge.calibrate.walk import Walk
from trtforge.core.manifest import Identity
from trtforge.core.partial import Finished
from trtforge.core.progress import Silent
from trtforge.formats.hf import open_checkpoint
from trtforge.models.family import Family
from trtforge.models.registry import family_of_checkpoint
from trtforge.reference.hidden import HiddenStates

MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe"),
    "qwen3_next",
)
STACKED = ("llama4", "llama4_dense_between")
BIASED = "gpt_oss"


def walk(
    source: Path,
    directory: Path,
    batches: list[torch.Tensor],
    budget: int | None = None,
    dtype: torch.dtype = torch.float32,
    **needs: Any,
) -> tuple[dict[str, torch.Tensor], Family]:
    checkpoint = open_checkpoint(source)
    family = family_of_checkpoint(checkpoint)
    identity = Identity(stage="calibration", config={}, inputs={}, versions={})
    Finished.begin(directory, identity)
    facts = family.facts(checkpoint.config)
    steps = Walk(checkpoint, family, facts, Needs(kv_cache=True, **needs), torch.device("cpu"), dtype, directory)
    with torch.inference_mode(), Silent().bar("", 1, "") as bar:
        return steps.run(batches, budget, bar), family


@pytest.mark.parametrize("name", [name for name in TINY if name not in (*MIXTURES, *STACKED, BIASED)])
def test_inputs_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    model = TINY[name]()
    model.save_pretrained(tmp_path / "hf")
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 131, (2, 24), generator=generator), torch.randint(0, 131, (1, 9), generator=generator)]
    found, family = walk(tmp_path / "hf", tmp_path / "partial", batches, budget=3000)

    seen: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if f"{path}.input_amax" in found:

            def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], path: str = path) -> None:
                seen[path] = torch.maximum(seen.get(path, torch.zeros(1)), inputs[0].abs().amax().reshape(1))

            module.register_forward_pre_hook(hook)
    with torch.inference_mode():
        for batch in batches:
            model(input_ids=batch)
    linears = {part.module for row in family.linears for part in row.parts}
    assert len(seen) == 4 * len(linears) == sum(key.endswith(".input_amax") for key in found)
    for path, amax in seen.items():
        assert torch.allclose(found[f"{path}.input_amax"], amax, rtol=2e-5), path
    assert all(found[f"layers.{layer}.kv_amax"] > 0 for layer in range(4))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_measured_one_by_one(tmp_path: Path, name: str) -> None:
    model = TINY[name]()
    model.save_pretrained(tmp_path / "hf")
    batches = [torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))]
    found, family = walk(tmp_path / "hf", tmp_path / "partial", batches)

    expected: dict[str, torch.Tensor] = {}
    fc, proj = family.experts
    for layer, block in enumerate(model.model.layers):
        if not hasattr(block.mlp, "experts"):
            continue

        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            hidden, chosen, _ = inputs
            for expert in range(len(module.gate_up_proj)):
                rows = hidden[(chosen == expert).any(dim=1)]
                if len(rows) == 0:
                    continue
                gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=1)
                prefix = f"{family.layer_prefix}.{layer}."
                for part in fc.parts:
                    expected[f"{prefix}{part.module.format(expert)}.input_amax"] = rows.abs().amax().reshape(1)
                inner = nn.functional.silu(gate) * up
                expected[f"{prefix}{proj.parts[0].module.format(expert)}.input_amax"] = inner.abs().amax().reshape(1)

        block.mlp.experts.register_forward_pre_hook(hook)
    with torch.inference_mode():
        model(input_ids=batches[0])
    assert expected
    for key, amax in expected.items():
        assert torch.allclose(found[key], amax, rtol=2e-5), key
    for key in (key for key in found if ".experts." in key and key not in expected):
        assert key.endswith(("weight_amax", "input_amax", "dead_channels"))


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_are_measured_one_by_one(tmp_path: Path, name: str) -> None:
    """Each by the tokens that its router chose it for, times their scores; gate and up are one matrix."""
    model = TINY[name]()
    model.save_pretrained(tmp_path / "hf")
    batch = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))
    found, _ = walk(tmp_path / "hf", tmp_path / "partial", [batch])
    expected: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        prefix = f"model.layers.{layer}.feed_forward"
        assert (f"{prefix}.gate_proj.input_amax" in found) is not block.is_moe_layer
        if not block.is_moe_layer:
            continue

        def hook(module: Any, inputs: tuple[torch.Tensor], prefix: str = prefix) -> None:
            hidden = inputs[0].view(-1, 64)
            logits = module.router(hidden)[1]
            for expert in range(4):
                rows = (logits.topk(module.top_k, dim=1).indices == expert).any(dim=1)
                states = hidden[rows] * logits[rows, expert].sigmoid().unsqueeze(1)
                gate, up = (states @ module.experts.gate_up_proj[expert]).chunk(2, dim=1)
                inner = nn.functional.silu(gate) * up
                for part, values in (("gate_up_proj", states), ("down_proj", inner)):
                    expected[f"{prefix}.experts.{expert}.{part}.input_amax"] = values.abs().amax().reshape(1)
                    weight = getattr(module.experts, part)[expert].abs().amax().reshape(1)
                    expected[f"{prefix}.experts.{expert}.{part}.weight_amax"] = weight

        block.feed_forward.register_forward_pre_hook(hook)
    with torch.inference_mode():
        model(input_ids=batch)
    assert {key for key in found if ".experts." in key and "dead" not in key} == set(expected)
    for key, amax in expected.items():
        assert torch.allclose(found[key], amax, rtol=2e-5), key


def test_experts_with_biases_are_measured_one_by_one(tmp_path: Path) -> None:
    """Nothing else of GPT-OSS may be quantised."""
    model = TINY[BIASED]()
    model.save_pretrained(tmp_path / "hf")
    batch = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))
    found, _ = walk(tmp_path / "hf", tmp_path / "partial", [batch])
    expected: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        prefix = f"model.layers.{layer}.mlp.experts"

        def hook(module: Any, inputs: tuple[torch.Tensor, ...], prefix: str = prefix) -> None:
            hidden, chosen, _ = inputs
            for expert in range(4):
                rows = hidden[(chosen == expert).any(dim=1)]
                gate, up = (
                    (rows @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]).view(-1, 32, 2).mT.unbind(1)
                )
                gate = gate.clamp(max=7)
                inner = (up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()
                for part, values in (("gate_up_proj", rows), ("down_proj", inner)):
                    largest = values.abs().amax().reshape(1) if len(values) else torch.zeros(1)
                    expected[f"{prefix}.{expert}.{part}.input_amax"] = largest
                    weight = getattr(module, part)[expert].abs().amax().reshape(1)
                    expected[f"{prefix}.{expert}.{part}.weight_amax"] = weight

        block.mlp.experts.register_forward_pre_hook(hook)
    with torch.inference_mode():
        model(input_ids=batch)
    assert {key for key in found if key.startswith("model.") and "dead" not in key} == set(expected)
    for key, amax in expected.items():
        assert torch.allclose(found[key], amax, rtol=2e-5), key
    assert all(found[f"layers.{layer}.kv_amax"] > 0 for layer in range(4))


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        (torch.float32, "nearest"),
        (torch.bfloat16, "nearest"),
        (torch.float32, "compensated"),
        (torch.bfloat16, "compensated"),
        (torch.float32, "nvfp4"),
    ],
)
def test_resuming_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, method: str
) -> None:
    """Killed after any layer, with hidden states saved after each."""
    TINY["llama"]().to(dtype).save_pretrained(tmp_path / "hf")
    batches = [torch.randint(0, 131, (windows, 48), generator=torch.Generator().manual_seed(1)) for windows in (2, 1)]
    wanted: dict[str, Any] = {"dtype": dtype, "awq": True, "group_size": 32, "clip": True, "budget": 15_000}
    wanted |= {"awq": method != "nvfp4", "nvfp4": method == "nvfp4", "compensated": method != "nearest"}
    whole, _ = walk(tmp_path / "hf", tmp_path / "whole", batches, **wanted)
    monkeypatch.setattr("trtforge.calibrate.walk._SECONDS_BETWEEN_SAVES", -1.0)

    class Killed(BaseException):
        pass

    keep = Walk._keep
    for victim in range(4):
        computed: list[int] = []

        def kept(self: Walk, layer: int, *results: dict[str, torch.Tensor], victim: int = victim) -> None:
            computed.append(layer)  # noqa: B023
            if layer == victim and len(computed) == victim + 1:  # noqa: B023
                raise Killed
            keep(self, layer, *results)

        monkeypatch.setattr(Walk, "_keep", kept)
        with pytest.raises(Killed):
            walk(tmp_path / "hf", tmp_path / f"partial{victim}", batches, **wanted)
        computed.append(-1)
        found, _ = walk(tmp_path / "hf", tmp_path / f"partial{victim}", batches, **wanted)
        assert computed[computed.index(-1) + 1 :] == list(range(victim, 4))
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[key], whole[key]) for key in whole)
        assert codes(tmp_path / f"partial{victim}") == codes(tmp_path / "whole")
    assert len(codes(tmp_path / "whole")) == (0 if method == "nearest" else 4)


def codes(directory: Path) -> dict[str, bytes]:
    """The files of compensated rounding."""
    return {path.name: path.read_bytes() for path in directory.glob("codes-*.safetensors")}


def test_states_that_cannot_be_saved_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    TINY["llama"]().save_pretrained(tmp_path / "hf")
    batches = [torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))]
    whole, _ = walk(tmp_path / "hf", tmp_path / "whole", batches)
    monkeypatch.setattr("trtforge.calibrate.walk._SECONDS_BETWEEN_SAVES", -1.0)

    def full(self: HiddenStates, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(HiddenStates, "save", full)
    found, _ = walk(tmp_path / "hf", tmp_path / "full", batches)
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    assert "hidden states are not saved (No space left on device)" in caplog.text
    assert not list((tmp_path / "full").glob("hidden-states*"))
