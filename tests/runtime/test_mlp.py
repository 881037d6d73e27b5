"""MLPs of many tokens are computed in parts."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.decoder import mlp
from trtforge.runtime.engine import EngineOptions
from trtforge.runtime.generate import generate


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_equally_long_and_give_the_whole(tokens: int, most: int) -> None:
    lengths = []

    def doubled(x: Tensor) -> Tensor:
        lengths.append(len(x))
        return 2 * x

    x = torch.arange(3 * tokens).view(tokens, 3)
    assert mlp.in_chunks(doubled, x, most).equal(2 * x)
    assert sum(lengths) == tokens
    assert len(lengths) == max(1, -(-tokens // most))
    assert max(lengths) - min(lengths) <= 1


def test_prompts_longer_than_a_chunk_are_answered_as_by_transformers(
    engine_directory: Path,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = []
    whole = mlp.in_chunks

    def noted(function: mlp.Linear, x: Tensor, most: int) -> Tensor:
        lengths.append(len(x))
        return whole(function, x, most)

    monkeypatch.setattr(mlp, "_CHUNK", 7)
    monkeypatch.setattr(mlp, "in_chunks", noted)
    requests = [GenerationRequest(str(n), tuple(prompt), 24) for n, prompt in enumerate(prompts)]
    assert [made.tokens for made in generate(engine_directory, requests, EngineOptions())] == expected
    assert max(lengths) > 7
