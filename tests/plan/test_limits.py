from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compile.checkpoints import engine, llama
from trtforge.core.errors import ForgeError
from trtforge.plan.limits import EngineLimits, derive_limits, model_seq_len

NO_CHUNKS = {"chunked_context": False}


def limits(checkpoint: dict[str, Any] | None = None, **values: Any) -> EngineLimits:
    return derive_limits(llama(**(checkpoint or {})), engine(**values), 32)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 8192),
        ({"type": "linear", "factor": 4.0}, 32768),
        ({"rope_type": "dynamic", "factor": 2.5}, 20480),
        ({"rope_type": "yarn", "factor": 4.0}, 32768),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"type": "longrope", "factor": 32.0}, 8192),
        ({"type": "su", "factor": 32.0}, 8192),
        ({"type": "linear"}, 8192),
    ],
)
def test_the_models_length_counts_its_rotary_scaling(scaling: dict[str, Any] | None, expected: int) -> None:
    assert model_seq_len(llama(rotary_scaling=scaling)) == expected
    assert limits({"rotary_scaling": scaling}).max_seq_len == expected


def test_defaults_follow_from_the_model() -> None:
    assert limits() == EngineLimits(
        max_batch_size=64,
        max_beam_width=1,
        max_input_len=8191,
        max_seq_len=8192,
        max_num_tokens=8192,
        tokens_per_block=32,
        longest_prompt=8191,
    )


def test_a_model_without_positions_gets_2048() -> None:
    assert limits({"max_position_embeddings": None}).max_seq_len == 2048


def test_the_recipe_of_the_manual() -> None:
    found = limits({"max_position_embeddings": 131072}, max_input_len=8192, max_seq_len=9216)
    assert (found.max_input_len, found.max_seq_len, found.longest_prompt) == (8192, 9216, 9215)
    assert found.warnings == ()


def test_max_num_tokens_is_capped_by_what_all_sequences_hold() -> None:
    assert limits(max_seq_len=128, max_batch_size=4).max_num_tokens == 512
    found = limits(max_seq_len=128, max_batch_size=4, max_num_tokens=4096)
    assert found.max_num_tokens == 512
    assert found.warnings == ("engine.max_num_tokens 4096 is lowered to 512: 4 sequences of 128 tokens hold no more.",)


def test_max_num_tokens_holds_a_block_and_a_token_of_every_beam() -> None:
    assert limits(max_seq_len=16, max_batch_size=1).max_num_tokens == 32
    assert limits(max_seq_len=64, max_batch_size=4096, max_beam_width=4).max_num_tokens == 16384


def test_a_prompt_that_cannot_be_cut_raises_the_default_step() -> None:
    long = {"max_position_embeddings": 131072}
    assert limits(long, max_input_len=20000, features=NO_CHUNKS).max_num_tokens == 20000
    assert limits(long, max_input_len=20000).max_num_tokens == 8192


def test_the_longest_prompt_with_and_without_chunked_context() -> None:
    long = {"max_position_embeddings": 131072}
    assert limits(long).longest_prompt == 131071
    whole = limits(long, features=NO_CHUNKS)
    assert (whole.longest_prompt, whole.max_input_len) == (8192, 8192)
    assert whole.warnings[0].startswith("Prompts are limited to 8192 tokens (max_num_tokens)")
    assert limits(max_seq_len=2048, features=NO_CHUNKS).longest_prompt == 2047


def test_tokens_per_block_of_the_recipe_wins() -> None:
    assert limits(tokens_per_block=128).tokens_per_block == 128
    assert derive_limits(llama(), engine(), 64).tokens_per_block == 64


def test_more_positions_than_the_model_has() -> None:
    assert "more than the model's context length of 8192" in limits(max_seq_len=9000).warnings[0]
    with pytest.raises(ForgeError, match=r"engine\.max_seq_len 9000 is more than the model's 8192 learned") as caught:
        limits({"position_embedding_type": "learned_absolute"}, max_seq_len=9000)
    assert caught.value.hint == "Use at most 8192."


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"max_input_len": 512, "max_seq_len": 512}, "leaves no room for an answer in max_seq_len 512", "at most 511"),
        ({"max_input_len": 8192}, r"max_seq_len 8192 \(the model's context length\)", "at most 8191"),
        ({"max_num_tokens": 63}, "needs 64 tokens", "at least 64"),
        ({"max_num_tokens": 16, "max_batch_size": 1}, "a KV block of 32", "at least 32"),
        ({"max_num_tokens": 64, "max_beam_width": 2}, "needs 128 tokens", "at least 128"),
        (
            {"max_input_len": 4096, "max_num_tokens": 2048, "features": NO_CHUNKS},
            "engine.max_input_len 4096 is more than max_num_tokens 2048",
            "Raise engine.max_num_tokens to 4096",
        ),
    ],
)
def test_an_impossible_limit_is_an_error(values: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        limits(**values)
    assert hint in caught.value.hint


@given(
    positions=st.integers(2, 200_000),
    batch=st.integers(1, 512),
    beams=st.integers(1, 4),
    block=st.sampled_from([1, 8, 32, 64, 128]),
    chunked=st.booleans(),
    max_seq_len=st.none() | st.integers(2, 100_000),
)
def test_derived_limits_are_consistent(
    positions: int, batch: int, beams: int, block: int, chunked: bool, max_seq_len: int | None
) -> None:
    found = limits(
        {"max_position_embeddings": positions},
        max_batch_size=batch,
        max_beam_width=beams,
        tokens_per_block=block,
        max_seq_len=max_seq_len,
        features={"chunked_context": chunked},
    )
    assert 1 <= found.max_input_len == found.longest_prompt <= found.max_seq_len - 1
    assert found.max_num_tokens >= max(block, batch * beams)
    assert found.max_num_tokens <= max(found.max_seq_len * batch, block, batch * beams)
    if not chunked:
        assert found.longest_prompt <= found.max_num_tokens
