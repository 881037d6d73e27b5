"""LoRA adapters mixed in one batch give what PEFT gives for each alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.runtime.adapters import ATTENTION, add_adapters, save_adapter, with_adapter
from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.converted import Families
from tests.runtime.test_speculation import NGRAMS, KeptRanks
from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraFeature, LoraModule
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import SchedulerPolicy
from trtforge.engine_process.requests import BeamParams, GenerationRequest, SamplingParams
from trtforge.formats.adapter import resolved_lora
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.plan.lora import embedded_bytes
from trtforge.plan.model import find_model
from trtforge.runtime.adapters.parts import adapted_parts
from trtforge.runtime.adapters.rank_adapters import adapted_contexts, adapter_bytes
from trtforge.runtime.adapters.required import require_adapters
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.drafting import NgramDrafter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks.source import open_engine

Tokens = tuple[int, ...]
COUNT, NEW = 16, 12


@pytest.fixture(scope="module")
def adapters(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sixteen adapters of different ranks, layers and scales."""
    kinds = (
        {},
        {"target_modules": ["q_proj", "v_proj"]},
        {"r": 2, "use_rslora": True, "target_modules": list(ATTENTION)},
        {"r": 6, "lora_alpha": 3, "target_modules": ["down_proj", "k_proj"]},
    )
    place = tmp_path_factory.mktemp("adapters")
    return [save_adapter(llama, place / f"a{n}", n, **kinds[n % len(kinds)]) for n in range(COUNT)]


@pytest.fixture(scope="module")
def answers(llama: LlamaForCausalLM, adapters: list[Path], prompts: list[list[int]]) -> list[Tokens]:
    """What PEFT generates greedily with each adapter, for the prompts in turn."""
    return [
        greedy(with_adapter(llama, adapter), [prompts[number % len(prompts)]], NEW)[0]
        for number, adapter in enumerate(adapters)
    ]


def asked(prompts: list[list[int]], numbers: Sequence[int]) -> list[GenerationRequest]:
    """Requests of adapters by their numbers; -1: without one, for the first prompt."""
    return [
        GenerationRequest(
            str(place), tuple(prompts[max(0, n) % len(prompts)]), NEW, lora_task_id=n + 1 if n >= 0 else None
        )
        for place, n in enumerate(numbers)
    ]


def test_contexts_with_the_same_adapter_are_computed_together() -> None:
    """Without those before the first context, and not across one that has none or another."""
    ends = [1, 2, 7, 9, 12, 20, 21, 30]
    assert adapted_contexts(ends, [3, 3, 3, 3, -1, 3, 0, 0], 2) == [(2, 9, 3), (12, 20, 3), (20, 30, 0)]
    assert adapted_contexts(ends, [0, 0, -1, -1, 2, 1, 1, -1], 0) == [(0, 2, 0), (9, 12, 2), (12, 21, 1)]
    assert adapted_contexts(ends, [-1] * 8, 0) == []
    assert adapted_contexts(ends, [1] * 8, 8) == []
    assert adapted_contexts([], [], 0) == []


LIMITS = {"max_batch_size": 20, "max_num_tokens": 512, "tokens_per_block": 4}


@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (Layout(), "native"),
        (Layout(tp=2), "native"),
        (Layout(tp=4), "native"),
        (Layout(pp=2), "native"),
        (Layout(tp=2), "torch"),
    ],
    ids=["one", "tp2", "tp4", "pp2", "torch-tp2"],
)
def test_sixteen_adapters_in_one_batch_are_those_of_peft(
    llama: LlamaForCausalLM,
    adapters: list[Path],
    answers: list[Tokens],
    expected: list[Tokens],
    prompts: list[list[int]],
    tmp_path: Path,
    layout: Layout,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    engine = write_engine(write_checkpoint(llama, tmp_path / "c", layout), tmp_path / "e", **LIMITS)
    source = open_engine(add_adapters(engine, adapters))
    ranks = KeptRanks(source, 400)
    with Engine(source, ranks, EngineOptions(kv_reuse=True)) as running:  # type: ignore[arg-type]
        made = generate_with(running, asked(prompts, [*range(COUNT), -1, 7, 7, 7]))
        assert running.statistics().kv_blocks_used == 0
    ranks.end()
    assert [each.tokens for each in made] == [*answers, expected[0][:NEW], *3 * [answers[7]]]
    assert len(set(answers)) == COUNT


def test_no_schedule_changes_answers(
    checkpoint: Path,
    adapters: list[Path],
    answers: list[Tokens],
    expected: list[Tokens],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Nor does a cache of few adapters, a prefix that another adapter computed, or a draft."""
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **LIMITS), adapters)
    source = open_engine(engine)
    lora = source.forge.features.lora
    assert lora is not None
    known = [*answers, expected[0][:NEW]]
    ranks = {}
    for most in (2, 5, 40):
        features = source.forge.features.model_copy(
            update={"lora": lora.model_copy(update={"host_memory": most * SIZE})}
        )
        held = replace(source, forge=source.forge.model_copy(update={"features": features}))
        ranks[most] = held, KeptRanks(held, 120)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        numbers=st.lists(st.integers(-1, COUNT - 1), min_size=1, max_size=10),
        policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        chunked=st.booleans(),
        most=st.sampled_from([2, 5, 40]),
        batch=st.integers(1, 10),
        drafts=st.booleans(),
    )
    def check(numbers: list[int], policy: SchedulerPolicy, chunked: bool, most: int, batch: int, drafts: bool) -> None:
        own, kept = ranks[most]
        drafter = NgramDrafter(NGRAMS) if drafts else None
        options = EngineOptions(scheduler=policy, chunked_context=chunked, max_batch_size=batch)
        with Engine(own, kept, options, drafter) as running:  # type: ignore[arg-type]
            made = generate_with(running, asked(prompts, numbers))
            assert running.statistics().kv_blocks_used == 0
        assert [each.tokens for each in made] == [known[number] for number in numbers]

    check()
    for _, kept in ranks.values():
        kept.end()


SIZE = 4 * 6 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
"""Bytes of an adapter: 4 layers, rank 6, float32; the inputs and outputs of q, k and v, o, and the MLP."""


def test_an_adapter_that_a_step_needs_is_not_forgotten_before_it_is_placed(
    checkpoint: Path, adapters: list[Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Of one step's adapters some are placed when the cache drops others."""
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **LIMITS), adapters, host_memory=4 * SIZE)
    with Engine.load(engine) as running:
        for numbers in ([3, 4], [1, 2], [0, 1, 2, 4], [5], [0]):
            requests = [replace(request, max_tokens=1) for request in asked(prompts, numbers)]
            assert [made.error for made in generate_with(running, requests)] == [None] * len(numbers)


def test_the_cache_holds_the_least_recently_used_ones_within_its_bound(
    checkpoint: Path, adapters: list[Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **LIMITS), adapters, host_memory=3 * SIZE)
    ranks = KeptRanks(open_engine(engine), 100)
    cache = ranks.models[0].adapters
    assert cache is not None
    with Engine(open_engine(engine), ranks, EngineOptions()) as running:  # type: ignore[arg-type]
        for number, loads in ((0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (0, 4), (2, 4), (1, 5)):
            generate_with(running, asked(prompts, [number]))
            assert cache.loads == loads
            assert len(cache.held) <= 3
            assert set(cache._last) >= set(cache.held)
        assert set(cache.held) == {1, 2, 3}  # task ids of the numbers 0, 1 and 2
    ranks.end()
    small = add_adapters(write_engine(checkpoint, tmp_path / "small", **LIMITS), adapters, host_memory=SIZE - 1)
    with pytest.raises(
        ForgeError, match=f"has {SIZE} bytes, more than engine.features.lora.host_memory {SIZE - 1}"
    ) as raised:
        Engine.load(small)
    assert raised.value.hint == f"Compile with --feature lora.host_memory={SIZE} or more."


def test_beams_copies_and_log_probs_have_their_adapter(
    llama: LlamaForCausalLM, checkpoint: Path, adapters: list[Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", max_beam_width=3), adapters[:2])
    prompt = tuple(prompts[1])
    beam = GenerationRequest("0", prompt, 8, beams=BeamParams(3, 3), lora_task_id=1)
    scored = GenerationRequest(
        "1", prompt, 8, SamplingParams(return_log_probs=True, prompt_log_probs=True), lora_task_id=2
    )
    first = GenerationRequest("2", prompt, 8, SamplingParams(top_k=20, seed=1), lora_task_id=1)
    copies = [
        first,
        replace(first, request_id="3", copy_of="2"),
        replace(first, request_id="4", copy_of="2", lora_task_id=2),
    ]
    beams, scores, *same = generate(engine, [beam, scored, *copies])
    assert same[0].tokens == same[1].tokens != same[2].tokens
    searched = with_adapter(llama, adapters[0]).generate(
        torch.tensor([prompt]), max_new_tokens=8, num_beams=3, num_return_sequences=3, length_penalty=0.0,
        early_stopping=True, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert [each.tokens for each in beams.beams] == [tuple(row[len(prompt) :].tolist()) for row in searched]
    with torch.no_grad():
        logits = with_adapter(llama, adapters[1])(torch.tensor([[*prompt, *scores.tokens]])).logits[0]
    reference = logits.log_softmax(dim=-1)[:-1].gather(1, torch.tensor([[*prompt, *scores.tokens]])[0, 1:, None])[:, 0]
    assert scores.prompt_log_probs is not None
    made = [*scores.prompt_log_probs.values, *scores.log_probs]
    assert made == pytest.approx(reference.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("phi3", [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
        ("qwen2", [*ATTENTION, "gate_proj", "down_proj"]),
        ("qwen3", [*ATTENTION, "up_proj"]),
        ("gemma2", [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
        ("mistral", ["q_proj", "v_proj", "up_proj"]),
        ("mixtral", list(ATTENTION)),
        ("qwen3", r".*layers\.[13]\.(?:self_attn\.(?:q|o)_proj|mlp\.up_proj)"),
        ("gpt2", ["c_attn"]),
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("gpt2", ["mlp.c_proj"]),
        ("gpt2", r".*\.[02]\.attn\.c_proj"),
        ("gpt_bigcode", ["c_attn"]),
        ("gpt_bigcode_heads", ["c_attn", "c_proj", "c_fc"]),
        ("falcon_7b", ["query_key_value"]),
        ("falcon_40b", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("falcon_11b", ["query_key_value"]),
        ("falcon_rw", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("gpt_neox", ["query_key_value"]),
        ("gpt_neox_sequential", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("bloom", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("starcoder2", [*ATTENTION, "c_fc", "c_proj"]),
        ("phi", ["q_proj", "v_proj", "dense", "fc1", "fc2"]),
        ("gptj", ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"]),
        ("opt", ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]),
        ("nemotron", [*ATTENTION, "down_proj"]),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_of_each_network(
    families: Families, tmp_path: Path, family: str, modules: list[str] | str, tp: int
) -> None:
    """By the names of their layers, or a regular expression."""
    one = families(family)
    adapter = save_adapter(one.model, tmp_path / "adapter", 5, target_modules=modules)
    engine = add_adapters(write_engine(one.checkpoint(tp=tp), tmp_path / "engine"), [adapter])
    source = open_engine(engine)
    ranks = KeptRanks(source, 20)
    prompt = list(range(5, 36))
    with Engine(source, ranks, EngineOptions()) as running:  # type: ignore[arg-type]
        request = GenerationRequest("0", tuple(prompt), 8, lora_task_id=1)
        made = generate_with(running, [request, replace(request, lora_task_id=None)])
    ranks.end()
    assert made[0].tokens == greedy(with_adapter(one.model, adapter), [prompt], 8)[0]
    assert made[1].tokens == greedy(one.model, [prompt], 8)[0]
    assert made[0].tokens != made[1].tokens


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("gpt2", ("attn_qkv", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h")),
        ("falcon_7b", ("attn_qkv", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h")),
        ("falcon_40b", ("attn_qkv",)),
        ("bloom", ("attn_qkv", "mlp_4h_to_h")),
        ("phi3", ("attn_qkv", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h")),
        ("qwen3", ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")),
    ],
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_as_many_bytes_as_planned(
    families: Families, family: str, modules: tuple[LoraModule, ...], tp: int
) -> None:
    config = read_checkpoint_config(families(family).checkpoint(tp=tp))
    model = find_model(str(families(family).directory / "hf"))
    lora = LoraFeature(max_rank=6, modules=modules)
    spec = DecoderSpec.of(config, tp - 1)
    held = adapter_bytes(
        lora, spec, adapted_parts(spec, config, modules), Placement(torch.device("cpu"), torch.float32)
    )
    assert held == embedded_bytes(model.family, model.facts.sizes, Parallel(tp=tp), lora, 4)


def test_unknown_adapters_are_refused_and_wrong_ones_not_compiled(
    llama: LlamaForCausalLM, checkpoint: Path, adapters: list[Path], tmp_path: Path
) -> None:
    engine = write_engine(checkpoint, tmp_path / "engine")
    (plain,) = generate(engine, [GenerationRequest("0", (1, 2), 2, lora_task_id=1)])
    assert plain.error is not None
    assert plain.error.message == "lora_task_id 1 is not an adapter of this engine"
    assert plain.error.hint == "This engine has none."
    (other,) = generate(add_adapters(engine, adapters[:2]), [GenerationRequest("0", (1, 2), 2, lora_task_id=3)])
    assert other.error is not None
    assert other.error.hint.startswith("Task ids: 1, 2. Send lora_weights and lora_config")
    config = read_checkpoint_config(checkpoint)

    def refused(adapter: Path) -> str:
        lora = resolved_lora(LoraFeature(adapters=(str(adapter),)))
        with pytest.raises(ForgeError) as raised:
            require_adapters(config, lora, [adapter], torch.float32)
        return raised.value.message

    whole = save_adapter(llama, tmp_path / "whole", 1)
    file = whole / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"

    def edited(changes: dict[str, torch.Tensor | None]) -> str:
        values = {key: value for key, value in {**tensors, **changes}.items() if value is not None}
        save_file(values, file)
        return refused(whole)

    assert "attn_q of layer 2 has A (4, 32) and B (64, 4), the model has 4 layers with 64 outputs" in edited(
        {name: torch.zeros(4, 32)}
    )
    assert edited({name: None}).endswith("attn_q of layer 2 has only lora_B")
    of_no_decoder = "is not a LoRA matrix of a decoder layer"
    assert edited({"other.weight": torch.zeros(2)}).endswith(f"other.weight {of_no_decoder}")
    tower = name.replace("model.layers", "model.vision_tower.vision_model.encoder.layers")
    assert edited({tower: torch.zeros(4, 64)}).endswith(f"{tower} {of_no_decoder}")
    not_finite = "attn_q of layer 2 has numbers that are not finite in float32"
    assert edited({name: torch.full((4, 64), torch.nan)}).endswith(not_finite)
    assert edited({name.replace("2", "7"): torch.zeros(4, 64)}).endswith("attn_q of layer 7 has only lora_A")
