"""Disaggregated serving: one engine computes a prompt, another one goes on from its first token and its KV blocks."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import DEMO_MODEL
from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import Families
from tests.runtime.test_engine import Tokens, requests_for
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import RequestError
from trtforge.core.llm_api_features import NgramFeature
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.context_phase import ContextPhase, prompt_digest, request_digest
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Guide, Output, PromptTable, SamplingParams
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate_with
from trtforge.runtime.kv_store import KvStore, KvStoreOptions

SIZE = 4  # tokens of a block
_VOCABULARY = 131


@pytest.fixture(scope="module")
def small_blocks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(checkpoint, tmp_path_factory.mktemp("small") / "engine", tokens_per_block=SIZE)


@pytest.fixture(scope="module")
def pair(small_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """An engine for contexts and one for answers, with their KV blocks in the same directory."""
    store = KvStoreOptions(tmp_path_factory.mktemp("kv"))
    with (
        Engine.load(small_blocks, EngineOptions(kv_store=store, chunked_context=True, max_num_tokens=16)) as context,
        Engine.load(small_blocks, EngineOptions(kv_store=store)) as generation,
    ):
        yield context, generation


@pytest.fixture(scope="module")
def alone(small_blocks: Path) -> Iterator[Engine]:
    with Engine.load(small_blocks, EngineOptions(kv_reuse=False)) as engine:
        yield engine


def phase_of(request: GenerationRequest, made: Generation) -> ContextPhase:
    """What a server makes of the answer to a context_only request, through its encoded form."""
    assert made.error is None
    token = made.tokens[0] if made.tokens else min(request.end_ids)
    scored = request.sampling.return_log_probs
    log_prob = (made.log_probs[0] if made.tokens else 0.0) if scored else None
    top = made.top_log_probs[0] if made.top_log_probs else ()
    return ContextPhase.decode(ContextPhase(token, prompt_digest(request.prompt), log_prob, top).encode())


def handed_on(pair: tuple[Engine, Engine], requests: list[GenerationRequest]) -> list[Generation]:
    """The answers of the second engine to prompts that the first one computed."""
    contexts = generate_with(pair[0], [replace(request, context_only=True) for request in requests])
    assert all(len(made.tokens) <= 1 for made in contexts)
    phases = [phase_of(request, made) for request, made in zip(requests, contexts, strict=True)]
    return generate_with(pair[1], [replace(r, context_phase=phase) for r, phase in zip(requests, phases, strict=True)])


def test_another_engine_goes_on_with_the_tokens_of_transformers(
    pair: tuple[Engine, Engine], prompts: list[list[int]], expected: list[Tokens]
) -> None:
    """It computes of each prompt only what does not fill a block, and reports what it reused."""
    before = pair[1].statistics().context_tokens
    made = handed_on(pair, requests_for(prompts, 24))
    assert [answer.tokens for answer in made] == expected
    assert [answer.reused_blocks for answer in made] == [len(prompt) // SIZE for prompt in prompts]
    left = sum(len(prompt) % SIZE + 1 for prompt in prompts if len(prompt) % SIZE)  # with the first token
    assert pair[1].statistics().context_tokens - before == left


def test_without_files_in_common_the_context_is_computed_again(
    small_blocks: Path, prompts: list[list[int]], expected: list[Tokens]
) -> None:
    with Engine.load(small_blocks) as context, Engine.load(small_blocks) as generation:
        made = handed_on((context, generation), requests_for(prompts, 24))
    assert [answer.tokens for answer in made] == expected
    assert [answer.reused_blocks for answer in made] == [0] * len(prompts)


def _words(largest: int, longest: int) -> st.SearchStrategy[Tokens]:
    return st.lists(st.integers(0, largest), min_size=1, max_size=longest).map(tuple)


def _requests() -> st.SearchStrategy[GenerationRequest]:
    sampling = st.builds(
        SamplingParams,
        temperature=st.sampled_from([None, 0.7]),
        top_k=st.sampled_from([None, 1, 5]),
        top_p=st.sampled_from([None, 0.8, 1.0]),
        seed=st.integers(0, 2**40),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        min_tokens=st.integers(0, 3),
        return_log_probs=st.booleans(),
        top_log_probs=st.sampled_from([0, 3]),
        top_p_decay=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.3]),
        no_repeat_ngram_size=st.sampled_from([0, 2]),
        prompt_ignore_length=st.sampled_from([0, 7]),
    )
    return st.builds(
        GenerationRequest,
        st.just("0"),
        _words(30, 40),
        st.integers(1, 9),
        sampling=sampling,
        end_ids=st.frozensets(st.integers(0, _VOCABULARY - 1), max_size=60),
        stop_words=st.lists(_words(_VOCABULARY - 1, 2), max_size=60).map(tuple),
        bad_words=st.lists(_words(30, 1), max_size=3).map(tuple),
        cache_salt=st.sampled_from([None, "a", "b"]),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(_requests(), min_size=1, max_size=6))
def test_answers_are_those_of_one_engine(
    pair: tuple[Engine, Engine], alone: Engine, requests: list[GenerationRequest]
) -> None:
    """Tokens, why they end, log probabilities: also where the first token ends the answer."""
    made, expected = handed_on(pair, requests), generate_with(alone, requests)
    for own, one in zip(made, expected, strict=True):
        assert (own.tokens, own.finish_reason, own.error) == (one.tokens, one.finish_reason, one.error)
        assert own.log_probs == pytest.approx(one.log_probs, abs=1e-4)
        if one.log_probs:  # else the sum is whatever other requests had computed
            assert own.cumulative_log_prob == pytest.approx(one.cumulative_log_prob, abs=1e-3)
        assert [[token for token, _ in top] for top in own.top_log_probs] == [
            [token for token, _ in top] for top in one.top_log_probs
        ]


@pytest.mark.parametrize(
    "name", ["gemma3", "mistral", "deepseek_v3", "gpt_oss", "qwen3_next", "llama-ngram", "llama-tp2"]
)
def test_every_layout_goes_on(families: Families, tmp_path: Path, prompts: list[list[int]], name: str) -> None:
    """Windows, latent attention, drafts, several ranks; with linear attention the prompt is computed again."""
    family, _, more = name.partition("-")
    checkpoint = families(family).checkpoint(**({"tp": 2} if more == "tp2" else {}))
    directory = write_engine(checkpoint, tmp_path / "engine", tokens_per_block=SIZE)
    again = name == "qwen3_next"
    store = None if again else KvStoreOptions(tmp_path / "kv")
    options = EngineOptions(kv_store=store, speculation=NgramFeature() if more == "ngram" else None)
    requests = [*requests_for(prompts, 12), *requests_for(prompts, 12, sampling=SamplingParams(top_p=0.9, seed=3))]
    with Engine.load(directory, options) as context, Engine.load(directory, options) as generation:
        made = handed_on((context, generation), requests)
        alone = generate_with(context, requests)
    assert [(one.tokens, one.finish_reason) for one in made] == [(one.tokens, one.finish_reason) for one in alone]
    reused = [0 if again else len(request.prompt) // SIZE for request in requests[: len(prompts)]]
    assert [one.reused_blocks for one in made[: len(prompts)]] == reused


def test_a_guide_follows_the_first_token(tmp_path: Path) -> None:
    """Also where each engine has limits of its own, which say nothing of keys and values."""
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, tmp_path / "checkpoint").path
    limits = {"context": EngineConfig(backend="torch"), "other": EngineConfig(backend="torch", max_batch_size=3)}
    made = {name: compile_engine(config, checkpoint, tmp_path / name).path for name, config in limits.items()}
    options = EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))
    guide, prompt = Guide("regex", "[0-9]{3}x"), tuple(range(20, 90))
    request = GenerationRequest("0", prompt, 12, guide=guide, end_ids=frozenset({1}))
    with Engine.load(made["context"], options) as context, Engine.load(made["other"], options) as other:
        (answer,) = handed_on((context, other), [request])
        (whole,) = generate_with(context, [request])
        assert (answer.tokens, answer.finish_reason) == (whole.tokens, "end_id")
        assert answer.reused_blocks == 70 // other.statistics().tokens_per_block > 0


def test_the_answer_comes_when_the_blocks_are_written(
    small_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are answered meanwhile."""
    goes_on, write = threading.Event(), KvStore._write

    def slowly(store: KvStore, name: str, content: bytes) -> None:
        goes_on.wait(60)
        write(store, name, content)

    monkeypatch.setattr(KvStore, "_write", slowly)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(small_blocks, EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))) as engine:
        engine.submit((GenerationRequest("context", tuple(range(2 * SIZE)), 5, context_only=True), outputs.put))
        (other,) = generate_with(engine, requests_for([[7]], 2))
        assert len(other.tokens) == 2
        assert outputs.empty()
        goes_on.set()
        output = outputs.get(timeout=60)
        assert (output.finish_reason, len(output.tokens)) == ("length", 1)
        assert len([path for path in (tmp_path / "kv").glob("*/*") if path.suffix != ".new"]) == 2


def test_no_answer_waits_for_a_disk_that_hangs(
    small_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(KvStore, "_write", lambda *_: goes_on.wait(60))
    monkeypatch.setattr("trtforge.runtime.context_only._LONGEST", 0.05)
    with Engine.load(small_blocks, EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))) as engine:
        for _ in range(2):
            made = generate_with(engine, requests_for([list(range(2 * SIZE)), [7] * SIZE], 5, context_only=True))
            assert [len(each.tokens) for each in made] == [1, 1]
            assert not goes_on.is_set()
        goes_on.set()
    assert list((tmp_path / "kv").glob("*/*")) == []


def test_blocks_of_a_running_request_are_stored_for_a_context_with_its_beginning(
    small_blocks: Path, tmp_path: Path
) -> None:
    """They are held until that one ends, which may take long."""
    prompt, outputs, begun = tuple(range(3 * SIZE)), queue.SimpleQueue[Output](), list[Output]()
    context = GenerationRequest("context", (*prompt, 7), 5, context_only=True)
    with Engine.load(small_blocks, EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))) as engine:

        def first(output: Output) -> None:
            if not begun:
                engine.submit((context, outputs.put))
            begun.append(output)

        engine.submit((GenerationRequest("long", prompt, 150), first))
        assert outputs.get(timeout=60).reused_blocks == 3
        names = [path.name for path in (tmp_path / "kv").glob("*/*") if path.suffix != ".new"]
        assert begun[-1].finish_reason or len(names) == 3


def test_an_engine_that_closes_answers_what_waits_for_its_files(
    small_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(KvStore, "_write", lambda *_: goes_on.wait(60))
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine = Engine.load(small_blocks, EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv")))
    engine.submit((requests_for([list(range(SIZE))], 5, context_only=True)[0], outputs.put))
    while not engine.statistics().generated_tokens or engine.statistics().active_requests:
        pass
    assert outputs.empty()
    threading.Timer(0.2, goes_on.set).start()
    engine.close()
    assert outputs.get(timeout=60).finish_reason == "length"


def test_all_blocks_of_a_context_are_stored_however_many_one_step_computes(
    small_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits until there is room for the next one; blocks of other requests are left out."""
    options = EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))
    goes_on, write = threading.Event(), KvStore._write

    def slowly(store: KvStore, name: str, content: bytes) -> None:
        goes_on.wait(0.01)
        write(store, name, content)

    monkeypatch.setattr("trtforge.runtime.kv_store._MOST_WAITING", 1)
    monkeypatch.setattr(KvStore, "_write", slowly)
    with Engine.load(small_blocks, options) as engine:
        generate_with(engine, requests_for([list(range(5 * SIZE))], 5, context_only=True))
        assert len(list((tmp_path / "kv").glob("*/*"))) == 5


def test_a_disk_that_writes_nothing_stops_no_requests(
    small_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(KvStore, "_write", lambda *_: goes_on.wait(60))
    monkeypatch.setattr("trtforge.runtime.kv_store._MOST_WAITING", 1)
    monkeypatch.setattr("trtforge.runtime.kv_store._LONGEST_WAIT", 0.01)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(small_blocks, EngineOptions(kv_store=KvStoreOptions(tmp_path / "kv"))) as engine:
        engine.submit((GenerationRequest("context", tuple(range(5 * SIZE)), 5, context_only=True), outputs.put))
        (other,) = generate_with(engine, requests_for([[7]], 2))
        assert len(other.tokens) == 2
        assert outputs.empty()
        goes_on.set()
        assert outputs.get(timeout=60).finish_reason == "length"
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "KV blocks are not stored for 60 s: writing takes longer than 0.01 s"
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beams": BeamParams(2, 2), "context_only": True}, "a context_only request cannot use beam search"),
        ({"beams": BeamParams(2, 2)}, "a generation_only request cannot use beam search"),
        ({"context_only": True}, "context_phase_params is given for a context_only request"),
        ({"prompt": (1, 2, 4)}, "context_phase_params is of another prompt, adapter or prompt table"),
        ({"sampling": SamplingParams(prompt_log_probs=True)}, "returns neither logits nor log probabilities"),
        ({"sampling": SamplingParams(return_log_probs=True)}, "has no log probability of the first token"),
    ],
)
def test_what_does_not_go_together_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    directory = write_engine(checkpoint, tmp_path / "engine", max_beam_width=2)
    phase = ContextPhase(3, prompt_digest((1, 2, 3)))
    only = changes.get("beams") is not None and changes.get("context_only")
    request = GenerationRequest("0", (1, 2, 3), 5, context_phase=None if only else phase)
    with Engine.load(directory) as engine:
        (made,) = generate_with(engine, [replace(request, **changes)])  # type: ignore[arg-type]
        assert said in str(made.error)
        for wrong in ({"first_token": _VOCABULARY}, {"top": ((0, -1.0), (_VOCABULARY, -2.0))}):
            (made,) = generate_with(engine, [replace(request, context_phase=replace(phase, **wrong))])  # type: ignore[arg-type]
            assert str(made.error) == "context_phase_params has token 131, the vocabulary has 131 tokens"


def test_the_digest_is_of_all_that_the_keys_and_values_are_computed_from() -> None:
    table = PromptTable(1, 2, "float32", bytes(8))
    requests = [
        GenerationRequest("0", (1, 131), 5),
        GenerationRequest("0", (1, 130), 5),
        GenerationRequest("0", (1, 131), 5, lora_task_id=0),
        GenerationRequest("0", (1, 131), 5, lora_task_id=1),
        GenerationRequest("0", (1, 131), 5, prompt_table=table),
        GenerationRequest("0", (1, 131), 5, prompt_table=replace(table, data=bytes(7) + b"1")),
        GenerationRequest("0", (1, 131), 5, prompt_table=replace(table, rows=2, width=1)),
        GenerationRequest("0", (1, 131), 5, prompt_table=replace(table, dtype="float16")),
        GenerationRequest("0", (1, 131), 5, prompt_table=replace(table, extra_ids=(0, 1))),
    ]
    digests = [request_digest(request) for request in requests]
    assert len(set(digests)) == len(requests)
    assert digests[0] == prompt_digest((1, 131))
    assert [request_digest(replace(request, request_id="1", max_tokens=1)) for request in requests] == digests


def test_an_answer_with_another_adapter_is_refused(pair: tuple[Engine, Engine]) -> None:
    request = GenerationRequest("0", (1, 2, 3), 5, context_phase=ContextPhase(3, prompt_digest((1, 2, 3), adapter=1)))
    (made,) = generate_with(pair[1], [request])
    assert str(made.error) == "context_phase_params is of another prompt, adapter or prompt table"


@given(
    st.builds(
        ContextPhase,
        st.integers(-1, 200_000),
        st.text("0123456789abcdef", min_size=32, max_size=32),
        st.none() | st.floats(-1e6, 0),
        st.lists(st.tuples(st.integers(0, 200_000), st.floats(-1e6, 0)), max_size=20).map(tuple),
    )
)
def test_what_is_handed_on_can_be_read_again(phase: ContextPhase) -> None:
    phase = phase if phase.log_prob is not None else replace(phase, top=())
    assert ContextPhase.decode(phase.encode()) == phase


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_nothing_else_is_read(data: bytes) -> None:
    with pytest.raises(RequestError, match="context_phase_params"):
        ContextPhase.decode(data)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"version":2,"first_gen_tokens":[1],"prompt":""}',
        '{"version":1,"first_gen_tokens":[],"prompt":""}',
        '{"version":1,"first_gen_tokens":[1,2],"prompt":""}',
        '{"version":1,"first_gen_tokens":[true],"prompt":""}',
        '{"version":1,"first_gen_tokens":[1],"prompt":7}',
        '{"version":1,"first_gen_tokens":[1],"prompt":"","log_probs":[NaN]}',
        '{"version":1,"first_gen_tokens":[1],"prompt":"","log_probs":["0"]}',
        '{"version":1,"first_gen_tokens":[1],"prompt":"","log_probs":[-1e39]}',
        '{"version":1,"first_gen_tokens":[1],"prompt":"","log_probs":[0],"top_log_probs":[[1]]}',
        '{"version":1,"first_gen_tokens":[1],"prompt":"","log_probs":[0],"top_log_probs":4}',
        " " * 5000,
    ],
)
def test_values_of_other_kinds_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="context_phase_params"):
        ContextPhase.decode(text.encode())
