import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from trtforge.core.errors import ForgeError, RequestError
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Output, SamplingParams
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate, generate_with

Tokens = tuple[int, ...]


def requests_for(prompts: list[list[int]], max_tokens: int = 24, **changes: Any) -> list[GenerationRequest]:
    return [GenerationRequest(str(i), tuple(p), max_tokens, **changes) for i, p in enumerate(prompts)]


def tokens_of(directory: Path, prompts: list[list[int]], options: EngineOptions | None = None) -> list[Tokens]:
    return [generation.tokens for generation in generate(directory, requests_for(prompts), options)]


def test_concurrent_prompts_get_the_tokens_of_transformers(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    assert tokens_of(engine_directory, prompts) == expected


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (EngineOptions(kv_reuse=False), {}),
        (EngineOptions(chunked_context=True), {"max_num_tokens": 16}),
        (EngineOptions(scheduler="max_utilization", kv_cache_tokens=128, kv_reuse=False), {"tokens_per_block": 4}),
        (
            EngineOptions(scheduler="max_utilization", kv_cache_tokens=128, chunked_context=True),
            {"max_num_tokens": 24, "tokens_per_block": 4},
        ),
        (EngineOptions(kv_cache_tokens=128), {"max_batch_size": 3}),
        (EngineOptions(batching="static_padded"), {"max_batch_size": 3}),
        (EngineOptions(batching="static_dropped"), {"max_batch_size": 3}),
        (EngineOptions(), {"tokens_per_block": 4}),
    ],
    ids=["no-reuse", "chunked", "paused", "paused-chunked", "small-cache", "padded", "dropped", "small-blocks"],
)
def test_scheduling_does_not_change_the_tokens(
    checkpoint: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    options: EngineOptions,
    limits: dict[str, int],
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", **limits)
    with Engine.load(directory, options) as engine:
        made = generate_with(engine, requests_for(prompts))
        assert [generation.tokens for generation in made] == expected
        assert (engine.statistics().paused_requests > 0) == (options.scheduler == "max_utilization")
        assert engine.statistics().kv_blocks_used == 0


def test_blocks_that_paused_requests_find_again_are_not_reused_ones(
    checkpoint: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4)
    with Engine.load(directory, EngineOptions(scheduler="max_utilization", kv_cache_tokens=128)) as engine:
        made = generate_with(engine, requests_for(prompts))
        found = engine.statistics()
    assert found.paused_requests > 0
    assert found.kv_blocks_reused == sum(each.reused_blocks for each in made)


def test_options_lower_the_limits_of_an_engine_and_never_raise_them(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    def run(options: EngineOptions) -> tuple[int, int]:
        with Engine.load(engine_directory, options) as engine:
            made = generate_with(engine, requests_for(prompts))
            assert [generation.tokens for generation in made] == expected
            return engine.statistics().iterations, engine.statistics().max_requests

    steps, most = run(EngineOptions(chunked_context=True))
    lowered, fewer = run(EngineOptions(chunked_context=True, max_batch_size=2, max_num_tokens=8))
    assert (fewer, lowered > steps) == (2, True)
    assert run(EngineOptions(chunked_context=True, max_batch_size=most + 1, max_num_tokens=10**6))[1] == most


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 24},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["biases", "tied", "multi-head", "multi-query", "llama3-rope"],
)
def test_the_model_may_vary(tmp_path: Path, prompts: list[list[int]], changes: dict[str, Any]) -> None:
    model = tiny_llama(seed=3, **changes)
    directory = write_engine(write_checkpoint(model, tmp_path / "checkpoint"), tmp_path / "engine")
    assert tokens_of(directory, prompts) == greedy(model, prompts, 24)


def test_a_tied_checkpoint_without_lm_head_uses_the_embedding(tmp_path: Path, prompts: list[list[int]]) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_llama(tie_word_embeddings=True)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "rank0.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, checkpoint / "rank0.safetensors")
    assert tokens_of(write_engine(checkpoint, tmp_path / "engine"), prompts) == greedy(model, prompts, 24)


@pytest.mark.parametrize("quant", [None, "FP8", "W4A16_AWQ"])
def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd(
    llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]], quant: str | None
) -> None:
    layout = Layout(quant=quant, kv="FP8" if quant == "FP8" else None)
    directory = write_engine(write_checkpoint(llama, tmp_path / "checkpoint", layout), tmp_path / "engine")
    with Engine.load(directory, EngineOptions(kv_reuse=False)) as engine:
        crowd = generate_with(engine, requests_for(prompts))
        alone = [generate_with(engine, [request])[0] for request in requests_for(prompts)]
    assert crowd == alone


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_a_crowd(
    engine_directory: Path, prompts: list[list[int]]
) -> None:
    requests = [
        replace(request, sampling=SamplingParams(temperature=1.5, top_k=50, top_p=0.95, seed=i))
        for i, request in enumerate(requests_for(prompts))
    ]
    with Engine.load(engine_directory) as engine:
        crowd = generate_with(engine, requests)
        alone = [generate_with(engine, [request])[0].tokens for request in requests]
    assert [generation.tokens for generation in crowd] == alone
    assert len({generation.tokens for generation in crowd}) == len(prompts)


def test_a_repeated_prompt_reuses_its_blocks_and_gets_the_same_tokens(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    request = requests_for(prompts)[5]
    with Engine.load(engine_directory) as engine:
        first, second = (generate_with(engine, [request])[0] for _ in range(2))
    assert (first.reused_blocks, second.reused_blocks) == (0, 3)
    assert first.tokens == second.tokens == expected[5]


def test_an_end_id_ends_without_being_handed_out(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    end = expected[0][5]
    first = expected[0].index(end)
    made = generate(engine_directory, requests_for(prompts[:1], end_ids=frozenset({end})))
    assert (made[0].tokens, made[0].finish_reason) == (expected[0][:first], "end_id")


def test_a_stop_word_ends_and_is_part_of_the_output(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    word = expected[1][6:9]
    made = generate(engine_directory, requests_for(prompts[1:2], stop_words=((130, 130), word)))
    assert (made[0].tokens, made[0].finish_reason) == (expected[1][:9], "stop_word")


def test_min_tokens_holds_the_end_back_and_bad_words_never_appear(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    end = expected[0][0]
    held = requests_for(prompts[:1], end_ids=frozenset({end}), sampling=SamplingParams(min_tokens=6))
    assert len(generate(engine_directory, held)[0].tokens) >= 6
    bad = requests_for(prompts[:1], bad_words=((end,), expected[0][3:5]))
    made = generate(engine_directory, bad)[0].tokens
    assert end not in made
    assert all(made[i : i + 2] != expected[0][3:5] for i in range(len(made)))


def test_an_end_id_beyond_the_vocabulary_never_comes(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    request = requests_for(prompts[:1], end_ids=frozenset({-1, 10**6}), sampling=SamplingParams(min_tokens=3))
    assert generate(engine_directory, request)[0].tokens == expected[0]


def test_a_request_that_the_whole_cache_could_not_hold_is_refused(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    with Engine.load(engine_directory, EngineOptions(kv_cache_tokens=48)) as engine:
        large, small = generate_with(engine, [requests_for(prompts)[2], requests_for(prompts)[0]])
    assert "may need 63 tokens of KV cache, which holds 48" in str(large.error)
    assert small.tokens == expected[0]


def test_an_id_that_is_in_use_is_refused(engine_directory: Path) -> None:
    outputs: list[Output] = []
    done = threading.Event()

    def receive(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason == "length":
            done.set()

    with Engine.load(engine_directory) as engine:
        for _ in range(2):
            engine.submit((GenerationRequest("x", (1, 2, 3), 100), receive))
        assert done.wait(30)
    errors = [output.error for output in outputs if output.error]
    assert [str(error) for error in errors] == ["request id x is in use"]
    assert isinstance(errors[0], RequestError)


def test_log_probs_are_those_of_transformers(
    engine_directory: Path, llama: LlamaForCausalLM, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    import torch

    made = generate(engine_directory, requests_for(prompts[:2], sampling=SamplingParams(return_log_probs=True)))
    for generation, prompt in zip(made, prompts, strict=False):
        with torch.no_grad():
            logits = llama(torch.tensor([[*prompt, *generation.tokens]])).logits[0, len(prompt) - 1 : -1]
        reference = logits.log_softmax(1).gather(1, torch.tensor(generation.tokens).unsqueeze(1)).squeeze(1)
        assert generation.log_probs == pytest.approx(reference.tolist(), abs=1e-4)
        assert generation.cumulative_log_prob == pytest.approx(float(reference.sum()), abs=1e-3)


@pytest.mark.parametrize("options", [EngineOptions(), EngineOptions(chunked_context=True, kv_cache_tokens=256)])
def test_top_and_prompt_log_probs_are_those_of_transformers(
    engine_directory: Path, llama: LlamaForCausalLM, prompts: list[list[int]], options: EngineOptions
) -> None:
    import torch

    sampling = SamplingParams(return_log_probs=True, top_log_probs=3, prompt_log_probs=True)
    plain = SamplingParams(return_log_probs=True)
    asked = [*requests_for(prompts, sampling=sampling), *requests_for(prompts, sampling=plain)]
    # The second round finds the prompts' blocks in the cache, which have no logits.
    with Engine.load(engine_directory, options) as engine:
        made = [generate_with(engine, asked) for _ in range(2)][1]
    for generation, without, prompt in zip(made, made[len(prompts) :], prompts, strict=False):
        assert without.tokens == generation.tokens
        assert (without.top_log_probs, without.prompt_log_probs) == ((), None)
        with torch.no_grad():
            reference = llama(torch.tensor([[*prompt, *generation.tokens]])).logits[0].log_softmax(1)
        assert generation.prompt_log_probs is not None
        values = [*generation.prompt_log_probs.values, *generation.log_probs]
        top = [*generation.prompt_log_probs.top, *generation.top_log_probs]
        following = [*prompt, *generation.tokens][1:]
        assert values == pytest.approx(
            [float(row[token]) for row, token in zip(reference, following, strict=False)], abs=1e-4
        )
        likeliest = reference[:-1].topk(3)
        assert [[token for token, _ in row] for row in top] == likeliest.indices.tolist()
        assert [[value for _, value in row] for row in top] == [
            pytest.approx(row, abs=1e-4) for row in likeliest.values.tolist()
        ]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("a", (), 4), "the prompt is empty"),
        (GenerationRequest("a", (1, 131), 4), "outside of the vocabulary of 131"),
        (GenerationRequest("a", (1,) * 129, 4), "the prompt has 129 tokens, this engine takes at most 128"),
        (GenerationRequest("a", (1,), 0), "max_tokens is 0"),
        (GenerationRequest("a", (1,), "many"), "the request cannot be read: TypeError"),  # type: ignore[arg-type]
        (GenerationRequest("a", (1,), 1, SamplingParams(top_log_probs=21)), "top_log_probs is 21"),
        (GenerationRequest("a", (1,), 4, SamplingParams(min_p=float("nan"))), "min_p is nan"),
        (GenerationRequest("a", (1,), 4, SamplingParams(min_p=1.5)), "min_p is 1.5"),
        (GenerationRequest("a", (1,), 4, SamplingParams(no_repeat_ngram_size=-1)), "no_repeat_ngram_size is -1"),
        (GenerationRequest("a", (1,), 4, SamplingParams(prompt_ignore_length=-1)), "prompt_ignore_length is -1"),
        *(
            (GenerationRequest("a", (1,), 4, SamplingParams(top_p=0.9, **{name: value})), "cannot be read: TypeError")
            for name in ("no_repeat_ngram_size", "prompt_ignore_length", "seed", "top_k", "top_log_probs", "min_tokens")
            for value in (1.5, float("inf"), "1")
        ),
        (GenerationRequest("a", (1,), 4, SamplingParams(top_p=2.0)), "top_p is 2.0"),
        (GenerationRequest("a", (1,), 4, SamplingParams(embedding_bias=(1.0,))), "embedding_bias is 1"),
        (
            GenerationRequest("a", (1,), 4, SamplingParams(embedding_bias=np.zeros((131, 2)))),
            "embedding_bias has the shape (131, 2)",
        ),
        (GenerationRequest("a", (1,), 4, beams=BeamParams(1, 0)), "the request asks for 0 of 1 beams"),
        (GenerationRequest("a", (1,), 4, beams=BeamParams(1, 2)), "the request asks for 2 of 1 beams"),
        (GenerationRequest("a", (1,), 4, bad_words=((500,),)), "a bad word holds token ids outside"),
        (GenerationRequest("a", (1,), 4, SamplingParams(temperature=float("nan"))), "temperature is nan"),
        (GenerationRequest("a", (1,), 4, SamplingParams(temperature=1e-38)), "temperature is 1e-38"),
        (GenerationRequest("a", (1,), 4, SamplingParams(temperature=1.001e30)), "temperature is 1.001e+30"),
        (GenerationRequest("a", (1,), 4, SamplingParams(temperature=float("inf"))), "temperature is inf"),
        (GenerationRequest("a", (1,), 4, SamplingParams(repetition_penalty=1e-40)), "repetition_penalty is 1e-40"),
        (GenerationRequest("a", (1,), 4, SamplingParams(presence_penalty=float("inf"))), "presence_penalty is inf"),
        (GenerationRequest("a", (1,), 4, SamplingParams(frequency_penalty=1e39)), "frequency_penalty is 1e+39"),
        (GenerationRequest("a", (1,), 4, SamplingParams(embedding_bias=(float("nan"),) * 131)), "has nan"),
        (GenerationRequest("a", (1,), 4, SamplingParams(embedding_bias=(float("inf"),) * 131)), "has inf"),
        (
            GenerationRequest("a", (1,), 4, SamplingParams(embedding_bias=(float("-inf"),) * 131)),
            "excludes all tokens",
        ),
    ],
)
def test_a_bad_request_gets_an_error_and_disturbs_nobody(
    engine_directory: Path, prompts: list[list[int]], expected: list[Tokens], request_: GenerationRequest, message: str
) -> None:
    good, bad, _ = generate(engine_directory, [requests_for(prompts)[0], request_, requests_for(prompts)[1]])
    assert good.tokens == expected[0]
    assert bad.finish_reason == "error"
    assert message in str(bad.error)


def test_the_limits_of_factors_may_come_in_float32(engine_directory: Path, prompts: list[list[int]]) -> None:
    one = requests_for(prompts[:1])[0]
    largest, least = float(np.float32(1e30)), float(np.float32(1e-30))
    kinds = (
        SamplingParams(top_p=1.0, temperature=largest),
        SamplingParams(top_p=1.0, temperature=least),
        SamplingParams(repetition_penalty=largest, presence_penalty=-largest, frequency_penalty=largest),
    )
    made = generate(engine_directory, [replace(one, sampling=kind) for kind in kinds])
    assert [each.error for each in made] == [None] * 3


def test_output_is_clipped_to_max_seq_len(checkpoint: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", max_seq_len=20, max_input_len=20)
    made = generate(directory, requests_for(prompts[1:2], max_tokens=100))
    assert (len(made[0].tokens), made[0].finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("forge"), "is an engine of TensorRT-LLM"),
        (lambda values: values["forge"].update(spam=1), "unknown key spam"),
        (lambda values: values["build_config"].update(max_batch_size=0), "build_config.max_batch_size is 0"),
        (lambda values: values["pretrained_config"].update(architecture="X"), "architecture X is not supported"),
        (lambda values: values["pretrained_config"].update(mapping={"tp_size": 3}), "tp_size 3 is not supported"),
        (lambda values: values["pretrained_config"].update(num_hidden_layers=3), "unexpected tensors"),
        (lambda values: values["pretrained_config"].update(hidden_size=32), "is expected"),
        (
            lambda values: values["forge"]["kernels"].update(cpu_capability="OTHER"),
            "packed for OTHER CPUs",
        ),
    ],
)
def test_a_directory_that_cannot_be_loaded_says_why(
    engine_directory: Path, tmp_path: Path, change: Any, message: str
) -> None:
    for file in engine_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((tmp_path / "config.json").read_text())
    change(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ForgeError, match=message):
        Engine.load(tmp_path)


def test_a_truncated_rank_file_is_named(engine_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((engine_directory / "config.json").read_bytes())
    with pytest.raises(ForgeError, match=r"rank0.safetensors is missing"):
        Engine.load(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes((engine_directory / "rank0.safetensors").read_bytes()[:-100])
    with pytest.raises(ForgeError, match=r"rank0.safetensors is truncated"):
        Engine.load(tmp_path)
