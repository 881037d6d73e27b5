"""One layer at a time is what all layers at once are: logits, states, and files that hold more than the model needs."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import TINY
from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import LONG, TOKENS, Families, computed, edited, error
from trtforge.core.errors import ForgeError
from trtforge.runtime.ranks import layerwise, single_tokens
from trtforge.runtime.ranks.layerwise import Layerwise
from trtforge.runtime.ranks.source import open_model


def by_layer(directory: Path, *sequences: list[int]) -> list[torch.Tensor]:
    with Layerwise(open_model(directory), sequences) as model:
        for _ in range(model.num_layers):
            model.advance()
        model.load_logits()
        return [model.logits(index) for index in range(len(sequences))]


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_the_whole_model(families: Families, name: str) -> None:
    checkpoint = families(name).checkpoint()
    found = by_layer(checkpoint, TOKENS, TOKENS[:7])
    assert [len(logits) for logits in found] == [len(TOKENS), 7]
    for logits, expected in zip(found, computed(checkpoint, TOKENS, TOKENS[:7]), strict=True):
        assert error(logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "deepseek_v2"])
def test_logits_of_many_ranks_are_those_of_one(families: Families, name: str) -> None:
    family = families(name)
    assert error(by_layer(family.checkpoint(tp=2, pp=2), TOKENS)[0], family.logits(TOKENS)) < 1e-4


def test_a_split_embedding_is_put_together(families: Families) -> None:
    family = families("llama")
    checkpoint = family.checkpoint(tp=2, parallel_embedding=True, embedding_sharding_dim=1)
    assert error(by_layer(checkpoint, TOKENS)[0], family.logits(TOKENS)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "phi3_longrope"])
def test_long_sequences_in_pieces_are_one_sequence(
    families: Families, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = families(name).checkpoint()
    monkeypatch.setattr(layerwise, "TOKENS_AT_ONCE", 33)
    assert error(by_layer(checkpoint, LONG, TOKENS)[0], computed(checkpoint, LONG)[0]) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_is_computed_as_it_was_compiled(
    families: Families, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 rows are padded, and padding must not get in. Contexts stay these, which is how layers see them."""
    monkeypatch.setattr(single_tokens, "MOST_CHUNKED", 0)
    engine = write_engine(families("llama").checkpoint(), tmp_path / "engine", dtype=dtype)
    assert error(by_layer(engine, TOKENS, TOKENS[:5])[1], computed(engine, TOKENS[:5])[0]) < 1e-5


def test_states_follow_the_layers(families: Families) -> None:
    family = families("llama")
    with torch.no_grad():
        expected = family.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    with Layerwise(open_model(family.checkpoint(tp=2)), [TOKENS]) as model:
        assert (model.num_layers, model.hidden_size) == (len(expected) - 1, expected[0].shape[-1])
        for layer in range(model.num_layers - 1):  # transformers normalises the last one
            model.advance()
            assert error(model.states(0), expected[layer + 1][0]) < 1e-5


def test_tensors_without_a_place_are_named(families: Families, tmp_path: Path) -> None:
    checkpoint = families("llama").checkpoint()
    edited(checkpoint, tmp_path, {})
    tensors = load_file(checkpoint / "rank0.safetensors")
    (tmp_path / "rank0.safetensors").unlink()
    save_file(tensors | {"transformer.surplus": torch.zeros(1)}, tmp_path / "rank0.safetensors")
    with pytest.raises(ForgeError, match=r"1 unexpected tensors: transformer\.surplus"):
        by_layer(tmp_path, TOKENS)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "0 tokens cannot be computed"), ([1] * 5000, "5000 tokens cannot"), ([131], "outside of the vocabulary")],
)
def test_a_sequence_that_cannot_be_computed_is_an_error(families: Families, tokens: list[int], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        Layerwise(open_model(families("llama").checkpoint()), [TOKENS, tokens])


def test_a_rank_that_fails_is_told_and_ends_those_that_wait(
    families: Families, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the sum that rank 1 never sends."""
    before = set(threading.enumerate())
    with Layerwise(open_model(families("llama").checkpoint(tp=2)), [TOKENS]) as model:
        model.advance()

        def fail(*_: object) -> torch.Tensor:
            raise MemoryError("rank 1 has no room")

        monkeypatch.setattr(model._ranks[1], "compute", fail)
        with pytest.raises(MemoryError, match="rank 1 has no room"):
            model.advance()
    assert set(threading.enumerate()) == before
