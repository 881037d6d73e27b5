import copy
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.test_engine import Tokens, requests_for
from trtforge.core.errors import ForgeError
from trtforge.core.features import DraftFeature
from trtforge.engine_process.requests import GenerationRequest, SamplingParams
from trtforge.runtime.draft_model import DraftModel
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with

ONE = Layout()


def smaller(llama: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The first layers of a model, which agree with the whole where the others add little."""
    draft = copy.deepcopy(llama)
    draft.model.layers = draft.model.layers[:layers]
    draft.config.num_hidden_layers = layers
    return draft


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    """A Llama whose last two layers add little."""
    model = tiny_llama(seed=4)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.2
            layer.mlp.down_proj.weight *= 0.2
    return model


def paired(target: LlamaForCausalLM, path: Path, layout: Layout = ONE, **limits: int) -> Path:
    """An engine with the engine of its draft model."""
    engine = write_engine(write_checkpoint(target, path / "target", layout), path / "engine", **limits)
    write_engine(write_checkpoint(smaller(target, 2), path / "draft"), engine / "draft_engine", **limits)
    return engine


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), EngineOptions()),
        (Layout(), EngineOptions(scheduler="max_utilization", kv_cache_tokens=128, kv_reuse=False)),
        (Layout(tp=2), EngineOptions(chunked_context=True)),
    ],
    ids=["one", "paused", "tp2"],
)
def test_greedy_tokens_are_those_of_the_target(
    target: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]], layout: Layout, options: EngineOptions
) -> None:
    expected = greedy(target, prompts, 24)
    directory = paired(target, tmp_path, layout, tokens_per_block=4, max_num_tokens=128)
    with Engine.load(directory, replace(options, speculation=DraftFeature(tokens=4))) as engine:
        made = generate_with(engine, requests_for(prompts))
        again = generate_with(engine, requests_for(prompts))
        found, drafter = engine.statistics(), engine._drafts.own
    assert [generation.tokens for generation in made] == expected
    assert [generation.tokens for generation in again] == expected
    assert isinstance(drafter, DraftModel)
    assert (found.kv_blocks_used, drafter.used_blocks) == (0, 0)
    assert found.accepted_tokens > found.drafted_tokens / 4
    assert sum(each.accepted_tokens for each in [*made, *again]) == found.accepted_tokens


def test_samples_have_the_targets_distribution(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Chi-square of the first three tokens, of which two are verified, over 1,500 seeds."""
    directory = paired(target, tmp_path, max_batch_size=64, max_num_tokens=2048)
    prompt, count, kept = (7, 90, 41), 1500, 3
    sampling = SamplingParams(top_k=kept, temperature=1.5)
    asked = [GenerationRequest("", prompt, 4, replace(sampling, seed=1000 + seed)) for seed in range(count)]
    with Engine.load(directory, EngineOptions(speculation=DraftFeature(tokens=2))) as engine:
        made = generate_with(engine, asked)
        found = engine.statistics()
    expected: dict[Tokens, float] = {(): 1.0}
    for _ in range(3):
        longer: dict[Tokens, float] = {}
        for tokens, share in expected.items():
            with torch.no_grad():
                likeliest = (target(torch.tensor([[*prompt, *tokens]])).logits[0, -1] / 1.5).topk(kept)
            for token, p in zip(likeliest.indices.tolist(), likeliest.values.softmax(0).tolist(), strict=True):
                longer[(*tokens, token)] = share * p
        expected = longer
    counts = dict.fromkeys(expected, 0)
    for generation in made:
        counts[generation.tokens[:3]] += 1
    chi_square = sum((counts[key] - count * share) ** 2 / (count * share) for key, share in expected.items())
    assert len(expected) == 27
    assert chi_square < 54.1  # 26 degrees of freedom, p = 0.001
    assert 0.2 < found.accepted_tokens / found.drafted_tokens < 1


@pytest.mark.parametrize("at_once", [128, 3])
def test_a_draft_model_like_the_target_is_always_right(target: LlamaForCausalLM, tmp_path: Path, at_once: int) -> None:
    """However few tokens it takes at once: logits of earlier steps are those of their own tokens."""
    engine = write_engine(write_checkpoint(target, tmp_path / "target"), tmp_path / "engine")
    write_engine(write_checkpoint(target, tmp_path / "same"), engine / "draft_engine", max_num_tokens=at_once)
    prompts = [[seed, 5, 9] for seed in range(6)]
    asked = requests_for(prompts, 21)
    sampled = [replace(each, sampling=SamplingParams(top_p=0.9, seed=seed)) for seed, each in enumerate(asked)]
    with Engine.load(engine, EngineOptions(speculation=DraftFeature(tokens=4))) as loaded:
        made = [*generate_with(loaded, asked), *generate_with(loaded, sampled)]
    for generation in made[:6]:
        assert (generation.drafted_tokens, generation.accepted_tokens) == (16, 16)
    assert sum(generation.accepted_tokens for generation in made[6:]) >= 94  # of 96: rounding may reject one
    assert {len(generation.tokens) for generation in made} == {21}


def test_sequences_beyond_the_draft_models_length_go_on_without_drafts(
    target: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]]
) -> None:
    engine = write_engine(write_checkpoint(target, tmp_path / "target"), tmp_path / "engine")
    draft = write_checkpoint(smaller(target, 1), tmp_path / "draft")
    write_engine(draft, engine / "draft_engine", max_seq_len=32, max_input_len=32)
    with Engine.load(engine, EngineOptions(speculation=DraftFeature(tokens=4))) as loaded:
        made = generate_with(loaded, requests_for(prompts))
    assert [generation.tokens for generation in made] == greedy(target, prompts, 24)
    assert [generation.drafted_tokens > 0 for generation in made] == [len(prompt) < 31 for prompt in prompts]


def test_a_draft_model_of_another_vocabulary_is_refused(target: LlamaForCausalLM, tmp_path: Path) -> None:
    engine = write_engine(write_checkpoint(target, tmp_path / "target"), tmp_path / "engine")
    write_engine(write_checkpoint(tiny_llama(vocab_size=99), tmp_path / "other"), engine / "draft_engine")
    with pytest.raises(ForgeError, match="the draft model has 99 tokens in its vocabulary, the engine 131"):
        Engine.load(engine, EngineOptions(speculation=DraftFeature()))


def test_options_that_follow_the_answers_length_are_the_drafts_too(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Only one answer is possible: `min_tokens` bars the end, then bad words leave nothing but the end."""
    directory, token, end = paired(target, tmp_path), 7, 9
    bias = np.full(131, -np.inf, dtype=np.float32)
    bias[[token, end]] = 0.0
    sampling = SamplingParams(top_p=1.0, min_tokens=3, embedding_bias=bias)
    asked = [
        GenerationRequest("", (3, 4, 5), 12, replace(sampling, seed=seed), frozenset({end}), bad_words=((token,) * 4,))
        for seed in range(40)
    ]
    with Engine.load(directory, EngineOptions(speculation=DraftFeature(tokens=4))) as engine:
        made = generate_with(engine, asked)
        assert engine.statistics().accepted_tokens > 40
    assert {(each.tokens, each.finish_reason) for each in made} == {((token,) * 3, "end_id")}


def test_greedy_drafts_of_mixed_requests_keep_each_ones_tokens(target: LlamaForCausalLM, tmp_path: Path) -> None:
    directory = paired(target, tmp_path)
    kinds = (SamplingParams(), SamplingParams(repetition_penalty=1.3), SamplingParams(min_tokens=4))
    asked = [GenerationRequest("", (3, kind, 8), 16, kinds[kind]) for kind in range(3)]
    made = []
    for options in (EngineOptions(speculation=DraftFeature(tokens=3)), None):
        if options is None:
            (directory / "draft_engine" / "config.json").unlink()
        with Engine.load(directory, options) as engine:
            made.append([generation.tokens for generation in generate_with(engine, asked)])
    assert made[0] == made[1]
    assert len(list(itertools.chain(*made[0]))) == 48
