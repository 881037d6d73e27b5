"""The model a layer at a time gives the logits of the whole one, in every family."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.families import TINY
from tests.reference.streamed import assert_streams, streamed
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import open_checkpoint
from trtforge.models.registry import family_of_checkpoint
from trtforge.reference.hidden import HiddenStates
from trtforge.reference.streaming import LayerStream, _naming_config
from trtforge.reference.weights import LayerWeights


@pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    model = TINY[name]()
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 131, shape, generator=generator) for shape in ((2, 24), (1, 9), (1, 24))]
    family = family_of_checkpoint(checkpoint)
    hidden_size = family.facts(checkpoint.config).sizes.hidden
    stream = LayerStream(LayerWeights(checkpoint, family, torch.device("cpu"), torch.float32))
    shapes = [(len(batch), batch.shape[1]) for batch in batches]
    hidden = HiddenStates(
        shapes, hidden_size, torch.float32, torch.device("cpu"), budget=4 * hidden_size * 9, directory=tmp_path
    )
    with torch.inference_mode():
        for layer in stream.layers(batches, hidden):
            layer.run()
        found = list(stream.logits(batches, hidden))
        for batch, logits in zip(batches, found, strict=True):
            expected = model(input_ids=batch).logits
            assert logits.shape == expected.shape
            assert float((logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    hidden.close()
    stream.close()


def test_a_head_that_is_stored_is_used_whatever_the_configuration_says(tmp_path: Path) -> None:
    """`transformers` ties only what is not stored."""
    model = TINY["llama_tied"]()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(2))
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(20).view(1, -1)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(input_ids=ids).logits
    _, found = streamed(tmp_path, ids)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("gap", [0, 1000, 1 << 15])
@pytest.mark.parametrize("ids", [[5], [0, 130], [130, 2, 3, 40, 41, 2], list(range(131))])
def test_rows_of_the_embedding_are_those_of_the_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: int, ids: list[int]
) -> None:
    monkeypatch.setattr("trtforge.reference.weights._GAP", gap)
    model = TINY["llama"]()
    model.save_pretrained(tmp_path)
    assert_streams(tmp_path, model, torch.tensor([ids]))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForgeError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        streamed(tmp_path, torch.arange(20).view(1, -1))


def test_config_json_is_blamed_for_errors_but_not_for_memory_that_ran_out(tmp_path: Path) -> None:
    blamed = r"config\.json: transformers cannot compute the model: KeyError: 'x'"
    with pytest.raises(ForgeError, match=blamed), _naming_config(tmp_path):
        raise KeyError("x")
    with pytest.raises(RuntimeError, match="can't allocate memory"), _naming_config(tmp_path):
        torch.empty(1 << 60, dtype=torch.uint8)
