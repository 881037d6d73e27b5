"""What the model of an llmapi engine asks of the LLM API for each request, and what it makes of the answers."""

import inspect
import queue
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.package import fake_tensorrt_llm
from tests.package.engines import llmapi_engine
from tests.patience import PATIENCE
from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError, RequestError
from trtforge.engine_process.ended_requests import end_of
from trtforge.engine_process.messages import Submission
from trtforge.engine_process.requests import GenerationRequest, Guide, Output, SamplingParams
from trtforge.engine_process.retention import KvCacheRetention, TokenRangeRetention

LATER = {"repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words_list", "runtime_top_p_decay"}
LOGITS, SCORES = {"embedding_bias", "min_tokens"}, {"return_log_probs", "return_prompt_logprobs"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llmapi_engine(tmp_path_factory.mktemp("llmapi") / "engine")


@pytest.fixture
def llm(engine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine of the model, with the fake LLM API below."""
    for name in ("tensorrt_llm", "tensorrt_llm.executor", "tensorrt_llm.llmapi", "tensorrt_llm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, fake_tensorrt_llm)
    monkeypatch.syspath_prepend(str(asset_directory("model_repo_templates") / "lib"))
    from llmapi_engine import LlmApiEngine  # type: ignore[import-not-found]

    made = LlmApiEngine({"model": str(engine), "max_num_tokens": 100, "enable_chunked_prefill": False})
    yield made
    made.close()
    assert not fake_tensorrt_llm.MADE[-1].running


def run(llm: Any, request: GenerationRequest, on_output: Callable[[Output], None] | None = None) -> list[Output]:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def seen(output: Output) -> None:
        if on_output:
            on_output(output)
        outputs.put(output)

    llm.submit((request, seen))
    found = [outputs.get(timeout=PATIENCE)]
    while found[-1].finish_reason is None:
        found.append(outputs.get(timeout=PATIENCE))
    return found


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def last_params() -> Any:
    return fake_tensorrt_llm.MADE[-1].requests[-1].params


def test_tokens_come_one_after_the_other(llm: Any) -> None:
    found = run(llm, GenerationRequest("a", (5, 6, 7), max_tokens=4, sampling=SamplingParams(return_log_probs=True)))
    assert tokens_of(found) == [5, 6, 7, 5]
    assert len(found) == 4
    assert (found[-1].finish_reason, found[-1].cumulative_log_prob) == ("length", -2.0)
    assert (found[-1].reused_blocks, found[-1].allocated_blocks) == (1, 3)
    assert [each.cached_tokens for each in found] == [0] * 4


def test_an_end_id_ends_and_is_no_part_of_the_answer(llm: Any) -> None:
    found = run(llm, GenerationRequest("a", (5, 6, 7), max_tokens=9, end_ids=frozenset({7, 9})))
    assert (tokens_of(found), found[-1].finish_reason) == ([5, 6], "end_id")
    assert (last_params().end_id, last_params().stop_token_ids, last_params().ignore_eos) == (7, [9], False)


def test_an_end_id_that_the_api_has_as_a_stop_word_ends_at_the_last_token_too(llm: Any) -> None:
    """TensorRT-LLM looks at the length before the stop words, so it says `length`."""
    found = run(llm, GenerationRequest("a", (5, 9), max_tokens=2, end_ids=frozenset({7, 9})))
    assert last_params().stop_token_ids == [9]
    assert (tokens_of(found), found[-1].finish_reason) == ([5], "end_id")
    found = run(llm, GenerationRequest("b", (5, 6), max_tokens=2, stop_words=((6,),)))
    assert (tokens_of(found), found[-1].finish_reason) == ([5, 6], "stop_word")


def test_without_end_ids_only_stop_words_end_an_answer(llm: Any) -> None:
    """SamplingParams with no end id takes the model's own ones, and with `ignore_eos` it drops the stop words."""
    sampling = SamplingParams(min_tokens=3)
    found = run(llm, GenerationRequest("a", (5, 6, 7), max_tokens=9, stop_words=((6,),), sampling=sampling))
    params = last_params()
    assert (params.end_id, params.pad_id, params.ignore_eos, params.stop_token_ids) == (-1, 0, False, [6])
    assert params.min_tokens is None  # it would forbid the vocabulary's last token
    assert (tokens_of(found), found[-1].finish_reason) == ([5, 6], "stop_word")


@pytest.mark.parametrize(("word", "expected"), [((6,), [5, 6]), ((6, 7), [5, 6, 7]), ((7, 5, 6), [5, 6, 7, 5, 6])])
def test_stop_words_of_any_length_end_an_answer(llm: Any, word: tuple[int, ...], expected: list[int]) -> None:
    found = run(llm, GenerationRequest("a", (5, 6, 7), max_tokens=9, stop_words=(word,)))
    assert (tokens_of(found), found[-1].finish_reason) == (expected, "stop_word")
    assert fake_tensorrt_llm.MADE[-1].requests[-1].aborted == (len(word) > 1)


def test_sampling_is_as_the_engines_do_it(llm: Any) -> None:
    run(llm, GenerationRequest("a", (5,), 1, SamplingParams(temperature=0.7)))
    assert (last_params().temperature, last_params().top_k) == (None, None)
    sampling = SamplingParams(
        temperature=0.7, top_k=8, seed=3, repetition_penalty=1.2, min_tokens=2, embedding_bias=(0.5, 1.0)
    )
    run(llm, GenerationRequest("b", (5,), 1, sampling, bad_words=((4,),), end_ids=frozenset({9})))
    params = last_params()
    assert (params.temperature, params.top_k, params.seed, params.repetition_penalty) == (0.7, 8, 3, 1.2)
    assert (params.min_tokens, params.bad_token_ids, params.detokenize) == (2, [4], False)
    assert params.embedding_bias.tolist() == [0.5, 1.0]
    assert (params.top_p_decay, params.top_p_min, params.top_p_reset_ids) == (None, None, None)
    run(llm, GenerationRequest("c", (5,), 1, SamplingParams(temperature=0.7, top_k=0)))  # all tokens, to the API
    assert (last_params().temperature, last_params().top_k, last_params().top_p) == (None, None, None)
    decaying = SamplingParams(top_p=0.9, top_p_decay=0.5, top_p_min=0.1, top_p_reset_id=4)
    run(llm, GenerationRequest("d", (5,), 1, decaying))
    assert (last_params().top_p, last_params().top_p_decay) == (0.9, 0.5)
    assert (last_params().top_p_min, last_params().top_p_reset_ids) == (0.1, 4)


@pytest.mark.parametrize(
    ("version", "arguments", "ignored", "scores"),
    [
        ("1.3.0", {}, set(), True),
        ("1.3.0rc24", {}, set(), True),
        ("1.3.0rc20", {}, LATER, True),
        ("1.2.1", {}, LATER, True),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}, set(), True),
        ("1.2.1", {"speculative_config": {"decoding_type": "NGram"}}, LATER, True),
        ("1.2.1", {"speculative_config": {"decoding_type": "Eagle"}}, LATER | LOGITS, False),
        ("1.3.0rc15.post1", {"speculative_config": {"decoding_type": "MTP"}}, LATER | LOGITS, False),
        ("1.0.3", {"enable_trtllm_sampler": True}, set(), True),
        ("1.0.0", {"enable_mixed_sampler": True}, LATER | LOGITS, True),
    ],
)
def test_what_a_releases_sampler_ignores_is_refused_by_its_name(
    version: str, arguments: dict[str, Any], ignored: set[str], scores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(asset_directory("model_repo_templates") / "lib"))
    from llmapi_sampling import Sampler  # type: ignore[import-not-found]

    sampler = Sampler.of(version, arguments)
    asked: dict[str, dict[str, Any]] = {
        **{f"{name}_penalty": {f"{name}_penalty": 0.5} for name in ("repetition", "presence", "frequency")},
        "runtime_top_p_decay": {"top_p": 0.9, "top_p_decay": 0.5},
        "embedding_bias": {"embedding_bias": (0.5,)},
        "min_tokens": {"min_tokens": 2},
        "return_log_probs": {"return_log_probs": True},
        "return_prompt_logprobs": {"prompt_log_probs": True},
    }
    refused = {}
    for name, values in asked.items():
        try:
            sampler.require(GenerationRequest("a", (5,), 3, SamplingParams(**values), end_ids=frozenset({9})))
        except ForgeError as error:
            refused[name] = error.message
    assert set(refused) | ({"bad_words_list"} & ignored) == ignored | (set() if scores else SCORES)
    assert all(message.startswith(f"{name}: ") and version in message for name, message in refused.items())
    if "bad_words_list" in ignored:
        with pytest.raises(ForgeError, match=rf"^bad_words_list: the sampler of TensorRT-LLM {version} ignores it"):
            sampler.require(GenerationRequest("a", (5,), 1, bad_words=((4,),)))


@pytest.mark.parametrize(
    ("arguments", "end_ids", "expected"),
    [
        ({"speculative_config": {"decoding_type": "MTP"}}, {9}, (-1, None, None)),
        ({}, {7, 9}, (-1, None, None)),
        ({}, {9}, (9, None, 4)),
    ],
)
def test_an_answer_that_must_have_all_its_tokens_has_them(
    llm: Any, arguments: dict[str, Any], end_ids: set[int], expected: tuple[int | None, ...]
) -> None:
    """As `trtforge bench` asks, also where the sampler ignores `min_tokens` or holds back one end id of several."""
    from llmapi_sampling import Sampler

    llm._sampler = Sampler.of("1.2.1", arguments)
    asked = GenerationRequest("a", (5, 9), 4, SamplingParams(min_tokens=4), end_ids=frozenset(end_ids))
    found = run(llm, asked)
    params = last_params()
    assert (params.end_id, params.stop_token_ids, params.min_tokens) == expected
    if params.end_id < 0:
        assert (tokens_of(found), found[-1].finish_reason) == ([5, 9, 5, 9], "length")


def test_scores_that_would_end_other_requests_are_refused(llm: Any) -> None:
    """MTPSampler asserts that no request of the batch asks for them; an assertion there ends every running request."""
    from llmapi_sampling import Sampler

    llm._sampler = Sampler.of("1.2.1", {"speculative_config": {"decoding_type": "MTP"}})
    (failed,) = run(llm, GenerationRequest("a", (5,), 1, SamplingParams(return_log_probs=True)))
    assert failed.error is not None
    assert failed.error.message.startswith("return_log_probs: TensorRT-LLM 1.2.1 returns no log probabilities")
    assert not fake_tensorrt_llm.MADE[-1].requests


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        (Guide("json"), {"json_object": True}),
        (Guide("json_schema", "{}"), {"json": "{}"}),
        (Guide("regex", "a+"), {"regex": "a+"}),
        (Guide("ebnf_grammar", "root ::= x"), {"grammar": "root ::= x"}),
        (Guide("structural_tag", "<a>"), {"structural_tag": "<a>"}),
    ],
)
def test_a_guide_is_the_apis_own(llm: Any, guide: Guide, expected: dict[str, Any]) -> None:
    run(llm, GenerationRequest("a", (5,), 1, guide=guide))
    assert last_params().guided_decoding == fake_tensorrt_llm.GuidedDecodingParams(**expected)
    run(llm, GenerationRequest("b", (5,), 1))
    assert last_params().guided_decoding is None


def test_a_request_names_an_adapter_of_the_engine(llm: Any, tmp_path: Path) -> None:
    llm._adapters = {2: str(tmp_path)}
    run(llm, GenerationRequest("a", (5,), 1, lora_task_id=2))
    assert fake_tensorrt_llm.MADE[-1].requests[-1].lora == fake_tensorrt_llm.LoRARequest("2", 2, str(tmp_path))
    (failed,) = run(llm, GenerationRequest("b", (5,), 1, lora_task_id=3))
    assert failed.error is not None
    assert (failed.error.message, failed.error.hint) == (
        "lora_task_id 3 is not an adapter of this model",
        "Task ids: 2.",
    )


def test_a_priority_is_passed_to_an_api_that_has_it(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (failed,) = run(llm, GenerationRequest("a", (5,), 1, priority=0.75))
    assert failed.error is not None
    assert failed.error.message == "this release of the LLM API has no priority"
    priorities: list[float] = []
    generate = llm._llm.generate_async

    def generate_async(*args: Any, priority: float = 0.5, **more: Any) -> Any:
        priorities.append(priority)
        return generate(*args, **more)

    monkeypatch.setattr(llm._llm, "generate_async", generate_async)
    llm._accepted = inspect.signature(generate_async).parameters
    run(llm, GenerationRequest("b", (5,), 1, priority=0.75))
    run(llm, GenerationRequest("c", (5,), 1))
    assert priorities == [0.75, 0.5]


def test_how_long_blocks_are_kept_is_passed_on_in_tensorrt_llms_class(llm: Any) -> None:
    ranges = (TokenRangeRetention(0, 4, 80, 1500), TokenRangeRetention(4, None, 10))
    run(llm, GenerationRequest("a", (5,), 1, kv_retention=KvCacheRetention(ranges, 60, 250)))
    found = fake_tensorrt_llm.MADE[-1].requests[-1].retention
    made = fake_tensorrt_llm.KvCacheRetentionConfig.TokenRangeRetentionConfig
    assert found.said == (
        [made(0, 4, 80, timedelta(milliseconds=1500)), made(4, None, 10)],
        60,
        timedelta(milliseconds=250),
    )
    run(llm, GenerationRequest("b", (5,), 1, kv_retention=KvCacheRetention()))
    assert fake_tensorrt_llm.MADE[-1].requests[-1].retention.said == ([], 35, None)
    run(llm, GenerationRequest("c", (5,), 1))
    assert fake_tensorrt_llm.MADE[-1].requests[-1].retention is None


def test_a_salt_is_passed_to_an_api_that_has_it(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (failed,) = run(llm, GenerationRequest("a", (5,), 1, cache_salt="mine"))
    assert failed.error is not None
    assert failed.error.message == "this release of the LLM API has no cache_salt"
    salts: list[str | None] = []
    generate = llm._llm.generate_async

    def generate_async(*args: Any, cache_salt: str | None = None, **more: Any) -> Any:
        salts.append(cache_salt)
        return generate(*args, **more)

    monkeypatch.setattr(llm._llm, "generate_async", generate_async)
    llm._accepted = inspect.signature(generate_async).parameters
    run(llm, GenerationRequest("b", (5,), 1, cache_salt="mine"))
    run(llm, GenerationRequest("c", (5,), 1))
    assert salts == ["mine", None]
    retained = GenerationRequest("d", (5,), 1, kv_retention=KvCacheRetention((), 5))
    (failed,) = run(llm, retained)
    assert failed.error is not None
    assert failed.error.message == "this release of the LLM API does not support KV cache retention"


def test_adapters_and_draft_model_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(asset_directory("model_repo_templates") / "lib"))
    from llmapi_arguments import adapters_of, read_arguments  # type: ignore[import-not-found]

    (tmp_path / "engine" / "adapters" / "7").mkdir(parents=True)
    (tmp_path / "model.yaml").write_text("model: engine\nspeculative_config: {speculative_model: engine/draft}\n")
    found = read_arguments(tmp_path / "model.yaml")
    assert found["speculative_config"]["speculative_model"] == str(tmp_path / "engine" / "draft")
    assert adapters_of(found) == {7: str(tmp_path / "engine" / "adapters" / "7")}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type is xml; it must be one of json, json_sch"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide is missing: regex needs it"),
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide_type is missing: it says what guided_decoding_guide"),
        ({"lora_task_id": 5}, "lora_task_id is 5; it must be one of this engine's: 1, 2"),
    ],
)
def test_guides_and_adapters_are_checked(inputs: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(asset_directory("model_repo_templates") / "lib"))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    from engine_requests import RequestLimits, requested_sequences  # type: ignore[import-not-found]
    from responder import RequestFailed  # type: ignore[import-not-found]

    base = {"input_ids": np.array([[5, 6]]), "input_lengths": np.array([[2]]), "request_output_len": np.array([[3]])}
    given = {
        name: np.array([[value.encode() if isinstance(value, str) else value]], dtype=object)
        for name, value in inputs.items()
    }
    limits = RequestLimits(100, 8, (2,), guided=True, lora_task_ids=(1, 2))
    with pytest.raises(RequestFailed) as caught:
        requested_sequences(base | given, limits)
    assert message in str(caught.value)
    with pytest.raises(RequestFailed, match="is not supported by this engine"):
        requested_sequences(base | given, RequestLimits(100, 8, (2,), guided=False))
    legal = {
        "guided_decoding_guide_type": np.array([[b"json_schema"]], dtype=object),
        "guided_decoding_guide": np.array([[b"{}"]], dtype=object),
        "lora_task_id": np.array([[2]], dtype=np.uint64),
    }
    (made,) = requested_sequences(base | legal, limits)
    assert (made.request.guide, made.request.lora_task_id) == (Guide("json_schema", "{}"), 2)
    sent = Submission.decode(Submission((made.request,)).encode()).requests[0]
    assert (sent.guide, sent.lora_task_id) == (Guide("json_schema", "{}"), 2)


def test_what_the_api_refuses_ends_that_request_only(llm: Any) -> None:
    (failed,) = run(llm, GenerationRequest("a", tuple(range(200)), 1))
    assert failed.error is not None
    assert "prompt length (200)" in failed.error.message
    assert end_of(failed, expired=False) == "invalid"
    (failed,) = run(llm, GenerationRequest("a", (5,), 1, bad_words=((4, 5),)))
    assert failed.error is not None
    assert failed.error.message == "bad_words: the LLM API supports single-token words only"
    assert end_of(failed, expired=False) == "invalid"
    assert tokens_of(run(llm, GenerationRequest("b", (5,), 2))) == [5, 5]


def test_errors_of_the_apis_processes_are_failures_to_the_metrics(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be the engine's, so that alerts must count them; they end that request only."""

    def ended(*_: object) -> NoReturn:
        raise RuntimeError("LLM is shutting down")

    with monkeypatch.context() as changed:
        changed.setattr(fake_tensorrt_llm.RequestOutput, "__aiter__", ended)
        (failed,) = run(llm, GenerationRequest("a", (5,), 1))
    assert isinstance(failed.error, RequestError)
    assert (failed.error.message, end_of(failed, expired=False)) == ("LLM is shutting down", "failed")
    assert tokens_of(run(llm, GenerationRequest("b", (5,), 2))) == [5, 5]


def test_steps_with_outputs_are_its_iterations(llm: Any) -> None:
    """An alert takes an engine with running requests and no iterations for one that hangs."""
    assert llm.figures()["iterations"] == 0
    run(llm, GenerationRequest("a", (5,), 3))
    assert 2 <= llm.figures()["iterations"] <= 3, "the last one may not have ended"


def test_a_cancelled_request_is_aborted(llm: Any) -> None:
    found = run(llm, GenerationRequest("a", (5,), 1000), lambda output: llm.cancel("a"))
    assert found[-1].finish_reason == "cancelled"
    assert len(found) < 10
    llm.cancel("a")


@pytest.mark.parametrize("bad_words", [(), ((4, 5),)])
def test_a_request_that_is_cancelled_before_it_starts_is_aborted(
    llm: Any, bad_words: tuple[tuple[int, ...], ...]
) -> None:
    """On the event loop's own thread: the cancel comes before the request's first step. Its id is free afterwards."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def submit_and_cancel(_: Output) -> None:
        llm.submit((GenerationRequest("b", (5,), 50, bad_words=bad_words), outputs.put))
        llm.cancel("b")

    run(llm, GenerationRequest("a", (5,), 1), submit_and_cancel)
    assert outputs.get(timeout=PATIENCE).finish_reason == ("error" if bad_words else "cancelled")
    assert [made.aborted for made in fake_tensorrt_llm.MADE[-1].requests] == ([False] if bad_words else [False, True])
    assert run(llm, GenerationRequest("b", (5,), 2))[-1].finish_reason == "length"


def test_the_likeliest_tokens_come_beside_the_scores(llm: Any) -> None:
    found = run(llm, GenerationRequest("a", (5, 6, 7), 3, SamplingParams(return_log_probs=True, top_log_probs=2)))
    assert last_params().logprobs == 2
    assert [score for output in found for score in output.log_probs] == [-0.5] * 3
    top = [each for output in found for each in output.top_log_probs]
    assert top == [[(token, -0.5), (token + 1, -1.5)] for token in (5, 6, 7)]
    run(llm, GenerationRequest("b", (5,), 1, SamplingParams(return_log_probs=True)))
    assert (last_params().logprobs, last_params().prompt_logprobs) == (1, None)


def test_a_prompt_is_scored_once_with_the_first_token(llm: Any) -> None:
    sampling = SamplingParams(prompt_log_probs=True, top_log_probs=2)
    first, *later = run(llm, GenerationRequest("a", (5, 6, 7), 3, sampling))
    assert (last_params().logprobs, last_params().prompt_logprobs) == (None, 2)
    assert first.prompt_log_probs is not None
    assert first.prompt_log_probs.values == [-0.5, -0.5]
    assert first.prompt_log_probs.top == ([(6, -0.5), (7, -1.5)], [(7, -0.5), (8, -1.5)])
    assert [output.prompt_log_probs for output in later] == [None, None]
    (alone,) = run(llm, GenerationRequest("b", (5,), 1, SamplingParams(prompt_log_probs=True)))
    assert alone.prompt_log_probs is not None
    assert (alone.prompt_log_probs.values, alone.prompt_log_probs.top) == ([], ())


def test_reused_blocks_leave_a_prompt_unscored(llm: Any) -> None:
    llm._llm.arguments["kv_cache_config"] = {"enable_block_reuse": True}
    request = GenerationRequest("a", (5, 6, 7, 8), 2, SamplingParams(prompt_log_probs=True))
    assert run(llm, request)[0].prompt_log_probs is not None
    (failed,) = run(llm, request)
    assert failed.error is not None
    assert "scored 2 of 4 positions" in failed.error.message
    assert "kv_reuse=false" in failed.error.message
    assert fake_tensorrt_llm.MADE[-1].requests[-1].aborted
    unscored = run(llm, GenerationRequest("b", (5, 6, 7, 8), 2))
    assert tokens_of(unscored) == [5, 6]
    assert [each.cached_tokens for each in unscored] == [2, 2], "as the LLM API tells"


def test_a_release_without_prompt_scores_is_said(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import make_dataclass

    older = make_dataclass("SamplingParams", [("logprobs", int, None)])
    monkeypatch.setattr(fake_tensorrt_llm, "SamplingParams", older)
    (failed,) = run(llm, GenerationRequest("a", (5,), 1, SamplingParams(prompt_log_probs=True)))
    assert failed.error is not None
    assert failed.error.message == (
        "return_prompt_logprobs: the installed TensorRT-LLM's SamplingParams has no prompt_logprobs"
    )


def test_scores_are_the_tokens_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dictionaries that TensorRT-LLM's pull request 3388 shows: the token may be beyond the likeliest ones."""
    monkeypatch.syspath_prepend(str(asset_directory("model_repo_templates") / "lib"))
    import llmapi_scores  # type: ignore[import-not-found]

    def entry(**ranked: tuple[float, int]) -> dict[int, SimpleNamespace]:
        return {int(token[1:]): SimpleNamespace(logprob=value, rank=rank) for token, (value, rank) in ranked.items()}

    beyond = entry(t2086=(-6.72, 113), t1244=(-2.87, 2), t11785=(-2.12, 1))
    assert llmapi_scores.log_probs([2086], [beyond]) == (-6.72,)
    assert llmapi_scores.top_log_probs([beyond], 2) == ([(11785, -2.12), (1244, -2.87)],)
    assert llmapi_scores.top_log_probs([beyond], 0) == ()
    assert llmapi_scores.log_probs([7], [-1.5]) == (-1.5,)
    with pytest.raises(ForgeError, match="does not return the log probability of token 9, only those of the 3 most"):
        llmapi_scores.log_probs([9], [beyond])
