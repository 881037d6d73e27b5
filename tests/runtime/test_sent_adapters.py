"""LoRA adapters that come with requests answer as the same adapters in the engine."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from tests.runtime.adapters import ATTENTION, add_adapters, lora_tensors, save_adapter, sent, with_adapter
from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.conftest import greedy
from tests.runtime.converted import Families
from tests.runtime.test_adapters import LIMITS, SIZE
from tests.runtime.test_speculation import KeptRanks
from trtforge.core.errors import ForgeError
from trtforge.engine_process.messages import Submission
from trtforge.engine_process.requests import GenerationRequest, SentAdapter
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate_with
from trtforge.runtime.native.compiler import compiled
from trtforge.runtime.ranks.engine_adapters import EngineAdapters
from trtforge.runtime.ranks.source import Source, open_engine

NEW = 12


@pytest.fixture(scope="module")
def adapters(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of different ranks, layers and scales."""
    kinds = (
        {},
        {"r": 2, "use_rslora": True, "target_modules": list(ATTENTION)},
        {"r": 6, "lora_alpha": 3, "target_modules": ["down_proj", "k_proj"]},
    )
    place = tmp_path_factory.mktemp("adapters")
    return [save_adapter(llama, place / f"a{n}", n, **kind) for n, kind in enumerate(kinds)]


def opened(engine: Path, place: Path) -> Source:
    return replace(open_engine(engine), sent_adapters=place)


def ask(prompt: list[int], task: int, adapter: SentAdapter | None = None) -> GenerationRequest:
    return GenerationRequest(f"{task}", tuple(prompt), NEW, lora_task_id=task, sent_adapter=adapter)


def refusal(made: Generation) -> tuple[str, str]:
    assert made.error is not None
    return made.error.message, made.error.hint


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=["one", "tp2", "pp2"])
def test_sent_adapters_answer_as_those_of_the_engine_and_as_peft(
    llama: LlamaForCausalLM, adapters: list[Path], prompts: list[list[int]], tmp_path: Path, layout: Layout
) -> None:
    engine = write_engine(write_checkpoint(llama, tmp_path / "c", layout), tmp_path / "e", **LIMITS)
    source = opened(add_adapters(engine, adapters), tmp_path / "sent")
    ranks = KeptRanks(source, 200)
    prompt = prompts[1]
    with Engine(source, ranks, EngineOptions()) as running:  # type: ignore[arg-type]
        own = [ask(prompt, number + 1) for number in range(len(adapters))]
        first = [ask(prompt, 2**63 + number, sent(adapter)) for number, adapter in enumerate(adapters)]
        made = generate_with(running, [*own, *first])
        later = generate_with(running, [ask(prompt, 2**63 + number) for number in range(len(adapters))])
        assert running.statistics().kv_blocks_used == 0
        assert len(list((tmp_path / "sent").iterdir())) == len(adapters)
    ranks.end()
    expected = [greedy(with_adapter(llama, adapter), [prompt], NEW)[0] for adapter in adapters]
    assert [each.tokens for each in (*made, *later)] == expected * 3
    assert len(set(expected)) == len(adapters)
    assert not (tmp_path / "sent").exists()


DENSE = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]


@pytest.mark.parametrize(
    ("family", "modules", "groups"),
    [
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], None),
        ("qwen3", [*ATTENTION, "gate_proj", "up_proj"], None),
        ("gpt2", ["c_attn", "c_proj", "c_fc"], None),
        ("gpt_bigcode_heads", ["c_attn", "c_proj", "c_fc"], 4),
        ("falcon_7b", DENSE, 1),
        ("falcon_40b", DENSE, 2),
        ("gpt_neox", DENSE, 4),
        ("bloom", DENSE, 4),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_modules_of_each_network(
    families: Families, tmp_path: Path, family: str, modules: list[str], groups: int | None, tp: int
) -> None:
    """By TensorRT-LLM's modules, whose rows of query, key and value are not interleaved."""
    one = families(family)
    adapter = save_adapter(one.model, tmp_path / "adapter", 5, target_modules=modules)
    engine = add_adapters(write_engine(one.checkpoint(tp=tp), tmp_path / "engine"), [adapter])
    source = opened(engine, tmp_path / "sent")
    ranks = KeptRanks(source, 20)
    prompt = list(range(5, 36))
    with Engine(source, ranks, EngineOptions()) as running:  # type: ignore[arg-type]
        (made,) = generate_with(running, [ask(prompt, 7, sent(adapter, groups, source.config.head_size))])
    ranks.end()
    assert made.tokens == greedy(with_adapter(one.model, adapter), [prompt], NEW)[0]


def test_an_engine_without_own_adapters_takes_them_and_its_processes_read_them(
    llama: LlamaForCausalLM, adapters: list[Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = write_engine(write_checkpoint(llama, tmp_path / "c", Layout(tp=2)), tmp_path / "e", **LIMITS)
    modules = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")
    add_adapters(engine, [], max_rank=4, modules=modules)
    with Engine.load(engine, EngineOptions(kv_cache_tokens=400)) as running:
        none, *made = generate_with(
            running,
            [ask(prompts[1], 3), ask(prompts[1], 1, sent(adapters[0])), ask(prompts[1], 2, sent(adapters[2]))],
        )
    assert made[0].tokens == greedy(with_adapter(llama, adapters[0]), [prompts[1]], NEW)[0]
    assert refusal(none) == (
        "lora_task_id 3 is not an adapter of this engine",
        "Send lora_weights and lora_config with the first request of another id.",
    )
    assert refusal(made[1])[0] == "lora_config has rank 6 in row 0"


def test_an_id_that_comes_with_other_weights_finds_no_blocks_of_the_former_ones(
    llama: LlamaForCausalLM, checkpoint: Path, adapters: list[Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **LIMITS), adapters[:1])
    source = opened(engine, tmp_path / "sent")
    ranks = KeptRanks(source, 100)
    prompt = prompts[2]
    with Engine(source, ranks, EngineOptions(kv_reuse=True)) as running:  # type: ignore[arg-type]
        asked = [ask(prompt, 5, sent(adapters[0])), ask(prompt, 5), ask(prompt, 5, sent(adapters[1])), ask(prompt, 5)]
        made = [generate_with(running, [each])[0] for each in asked]
    ranks.end()
    both = [greedy(with_adapter(llama, adapter), [prompt], NEW)[0] for adapter in adapters[:2]]
    assert [each.tokens for each in made] == [both[0], both[0], both[1], both[1]]
    assert [each.reused_blocks > 0 for each in made] == [False, True, False, True]


def test_the_least_recently_used_ones_go_and_those_in_use_stay(
    checkpoint: Path, adapters: list[Path], tmp_path: Path
) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "e", **LIMITS), adapters, host_memory=2 * SIZE)
    used: set[int] = set()
    known = EngineAdapters(opened(engine, tmp_path / "sent"), lambda: used)

    def refused(task: int, number: int | None = None) -> str | None:
        error = known.why_refused(ask([1], task, None if number is None else sent(adapters[number])))
        return None if error is None else error.message

    assert [refused(11, 0), refused(12, 1), refused(11)] == [None, None, None]
    assert refused(13, 2) is None
    assert [refused(12), refused(11), refused(13)] == ["lora_task_id 12 is not an adapter of this engine", None, None]
    used |= {known.resolved(ask([1], task)).lora_task_id or 0 for task in (11, 13)}
    assert len(list((tmp_path / "sent").iterdir())) == 2
    assert refused(12, 1) == "lora_weights: 2 adapters are in use, and no more fit"
    assert refused(14, 0) is None  # the same weights under another id
    assert known.resolved(ask([1], 14)).lora_task_id == known.resolved(ask([1], 11)).lora_task_id
    assert known.resolved(ask([1], 2)).lora_task_id == 2
    known.close()
    assert not (tmp_path / "sent").exists()


def test_wrong_adapters_take_no_place_of_others(checkpoint: Path, adapters: list[Path], tmp_path: Path) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "e", **LIMITS), adapters[:2], host_memory=SIZE)
    known = EngineAdapters(opened(engine, tmp_path / "sent"), set)
    assert known.most == 1
    assert known.why_refused(ask([1], 11, sent(adapters[0]))) is None
    error = known.why_refused(ask([1], 12, sent(adapters[2])))
    assert error is not None
    assert error.message == "lora_config has rank 6 in row 0"
    assert known.why_refused(ask([1], 11)) is None
    known.close()


def test_ids_are_bounded_where_many_stand_for_one_adapter(
    checkpoint: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.runtime.ranks.engine_adapters._MOST_IDS", 50)
    engine = add_adapters(write_engine(checkpoint, tmp_path / "e", **LIMITS), adapters[:1])
    known = EngineAdapters(opened(engine, tmp_path / "sent"), set)
    for task in range(100, 200):
        assert known.why_refused(ask([1], task, sent(adapters[0]))) is None
    refused = [known.why_refused(ask([1], task)) for task in range(100, 200)]
    assert [error is None for error in refused] == [False] * 50 + [True] * 50
    assert refused[0] is not None
    assert refused[0].hint == (
        f"Task ids: 1, {', '.join(map(str, range(150, 181)))}, …. "
        "Send lora_weights and lora_config with the first request of another id."
    )
    known.close()


def test_the_adapter_of_a_refused_request_is_not_kept(
    checkpoint: Path, adapters: list[Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **LIMITS), adapters)
    prompt = prompts[1]
    with Engine.load(engine) as running:
        (first,) = generate_with(running, [ask(prompt, 9, sent(adapters[0]))])
        (refused,) = generate_with(running, [replace(ask(prompt, 9, sent(adapters[1])), context_logits=True)])
        (again,) = generate_with(running, [ask(prompt, 9)])
    assert refusal(refused)[0] == "this engine returns no context logits"
    assert again.tokens == first.tokens


ENGINE = """
import pickle, signal, sys
from pathlib import Path
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with
with Engine.load(Path(sys.argv[1])) as engine:
    generate_with(engine, [pickle.load(sys.stdin.buffer)])
    print("kept", flush=True)
    signal.pause()
"""


def test_what_a_killed_engine_left_goes_at_the_next_start(
    checkpoint: Path, adapters: list[Path], prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its adapters and its lock file; those of an engine that runs stay, and it answers with them."""
    kernels = compiled()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))  # with the kernels, which take long to compile
    (tmp_path / "cache" / "kernels").mkdir(mode=0o700, parents=True)
    shutil.copy2(kernels, tmp_path / "cache" / "kernels")

    def places() -> set[Path]:
        return set((tmp_path / "tmp").glob("trtforge-adapters-*"))

    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", **LIMITS), adapters)
    request = ask(prompts[1], 7, sent(adapters[0]))
    with Engine.load(engine) as living:
        (first,) = generate_with(living, [request])
        own = places()
        environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
        with subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(engine)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            try:
                pickle.dump(request, other.stdin)
                other.stdin.flush()
                assert other.stdout.readline() == b"kept\n"
                Engine.load(engine).close()
                assert len(places() - own) == 2
            finally:
                other.kill()
        assert sorted(path.is_dir() for path in places() - own) == [False, True]
        Engine.load(engine).close()
        assert places() == own
        (again,) = generate_with(living, [ask(prompts[1], 7)])
    assert again.tokens == first.tokens
    assert places() == set()


def test_wrong_tensors_are_refused_by_their_names(checkpoint: Path, adapters: list[Path], tmp_path: Path) -> None:
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine"), adapters[:1])
    known = EngineAdapters(opened(engine, tmp_path / "sent"), set)
    right = sent(adapters[0])
    first = right.config[0]

    def refused(task: int | None = 9, adapter: SentAdapter = right, **changes: object) -> str:
        changed = replace(adapter, **changes)  # type: ignore[arg-type]
        error = known.why_refused(GenerationRequest("a", (1,), 1, lora_task_id=task, sent_adapter=changed))
        assert isinstance(error, ForgeError)
        assert error.hint
        return error.message

    def row(*values: int) -> tuple[tuple[int, ...], ...]:
        return (values, *right.config[1:])

    assert refused(config=row(12, 0, 4)) == "lora_config has module id 12 in row 0, which this engine does not support"
    assert refused(config=row(-1, 0, 4)).startswith("lora_config has module id -1 in row 0")
    assert refused(config=row(1, 4, 4)) == "lora_config has layer 4 in row 0"
    assert refused(config=row(1, 0, 0)) == "lora_config has rank 0 in row 0"
    assert refused(config=row(1, 0, 5)) == "lora_config has rank 5 in row 0"
    assert refused(config=row(*first[:3], 1)) == "lora_config has DoRA in row 0"
    assert refused(config=row(1, 0)) == "lora_config has 2 columns, 3 or 4 are expected"
    assert refused(config=(first, *right.config[:-1])).endswith("of layer 0 twice")
    assert refused(config=right.config[:-1]).startswith(
        f"lora_weights has {len(right.weights)} bytes, lora_config describes 27"
    )
    assert refused(dtype="float16").startswith(
        f"lora_weights has {len(right.weights)} bytes, lora_config describes 28 modules"
    )
    narrow = np.frombuffer(right.weights, np.float32).reshape(-1, right.width)[:, :500]
    assert "lora_weights has 500 values for module" in refused(width=500, weights=narrow.tobytes())
    broken = np.frombuffer(right.weights, np.float32).copy()
    broken[5] = np.nan
    assert refused(weights=broken.tobytes()).endswith("has numbers that are not finite")
    assert refused(task=None) == "lora_weights needs a lora_task_id"
    assert refused(task=1) == "lora_weights cannot be sent for lora_task_id 1, an adapter of the engine"
    assert not (tmp_path / "sent").exists()
    plain = EngineAdapters(open_engine(write_engine(checkpoint, tmp_path / "plain")), set)
    error = plain.why_refused(ask([1], 9, right))
    assert error is not None
    assert error.message == "lora_weights: this engine does not support adapters"


def test_tensors_become_a_request_that_reaches_the_engine_process(library: None, adapters: list[Path]) -> None:
    from engine_requests import RequestLimits, requested_sequences  # type: ignore[import-not-found]
    from responder import RequestFailed  # type: ignore[import-not-found]

    config, weights = lora_tensors(adapters[1])
    given = {
        "input_ids": np.array([[5, 6]], dtype=np.int32),
        "input_lengths": np.array([[2]], dtype=np.int32),
        "request_output_len": np.array([[4]], dtype=np.int32),
        "num_return_sequences": np.array([[2]], dtype=np.int32),
        "lora_task_id": np.array([[2**64 - 1]], dtype=np.uint64),
        "lora_config": config,
        "lora_weights": weights.astype(np.float16),
        "lookahead_window_size": np.array([[3]], dtype=np.int32),
        "lookahead_ngram_size": np.array([[2]], dtype=np.int32),
        "lookahead_verification_set_size": np.array([[1]], dtype=np.int32),
    }
    limits = RequestLimits(100, 8, (2,), takes_adapters=True, lookahead=True)
    first, second = (each.request for each in requested_sequences(given, limits))
    assert first.sent_adapter == SentAdapter(
        tuple(map(tuple, config[0].tolist())), "float16", weights.shape[2], weights[0].astype(np.float16).tobytes()
    )
    assert (first.lora_task_id, second.lora_task_id, second.sent_adapter) == (2**64 - 1, 2**64 - 1, None)
    assert first.lookahead is not None
    assert (first.lookahead.window, first.lookahead.ngram, first.lookahead.verification) == (3, 2, 1)
    named = (replace(first, request_id="0"), replace(second, request_id="1"))
    arrived = Submission.decode(Submission(named).encode()).requests
    assert [each.sent_adapter for each in arrived] == [first.sent_adapter, None]
    assert [(each.lora_task_id, each.prompt, each.lookahead) for each in arrived] == [
        (2**64 - 1, (5, 6), first.lookahead)
    ] * 2

    def refused(limits: RequestLimits = limits, **changes: np.ndarray | None) -> str:
        values = {name: value for name, value in (given | changes).items() if value is not None}
        with pytest.raises(RequestFailed) as raised:
            requested_sequences(values, limits)
        return str(raised.value)

    assert refused(lora_config=None) == "lora_config is missing"
    assert refused(lookahead_ngram_size=None) == "lookahead_ngram_size is missing"
    assert refused(lora_config=config[0]).startswith("lora_config is int32 [16, 3]; it must be a tensor")
    assert refused(lora_weights=weights.astype(np.float64)).startswith("lora_weights is float64 [1, 16, ")
    assert refused(lora_config=config[:, :5]) == "lora_weights has 16 modules, lora_config 5"
    assert refused(RequestLimits(100, 8, (2,))).endswith("is not supported by this engine")
