"""The Python API on the demo model; docs/python.md: every snippet runs."""

import asyncio
import gc
import json
import math
import pickle
import re
import shutil
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from tokenizers import Tokenizer

from tests.chat_templates import CALLING, write_tokenizer
from tests.conftest import DEMO_MODEL
from tests.core.test_detokenizer import TOKENIZERS
from tests.patience import PATIENCE, eventually
from tests.runtime.test_grammars import sentencepiece
from trtforge import (
    Chat,
    Engine,
    KvCacheRetention,
    Piece,
    SamplingParams,
    TokenRangeRetention,
    Tokens,
    Tuned,
    Usage,
)
from trtforge.api.prompts import Prompts
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError, RequestError
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import GenerationRequest, Guide, OnOutput, Output
from trtforge.engine_process.requests import SamplingParams as EngineSampling
from trtforge.formats.chat_template import ChatTemplate
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.runtime.guidance.grammars import Grammars
from trtforge.runtime.text import generate_text

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PROMPT = "Return the number of"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def engine(build: Path) -> Iterator[Engine]:
    with Engine.load(build) as engine:
        yield engine


def test_a_guided_answer_to_messages_keeps_its_first_space(tmp_path: Path) -> None:
    """Tokenizers of Llama 2's kind leave out the space before the first word of a text."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    sentencepiece().save(str(tmp_path / "model" / "tokenizer.json"))
    checkpoint = convert(ConvertConfig(dtype="float32"), tmp_path / "model", tmp_path / "checkpoint").path
    compile_engine(EngineConfig(backend="torch"), checkpoint, tmp_path / "engine")
    cases = (({"regex": " two"}, " two"), ({"regex": "two"}, "two"), ({"json_schema": {"const": 2}}, "2"))
    with Engine.load(tmp_path / "engine") as engine:
        for guide, text in cases:
            params = SamplingParams(max_tokens=8, **guide)  # type: ignore[arg-type]
            for prompt in (Chat(MESSAGES), "a"):
                assert engine.generate(prompt, params).text == text
                assert "".join(piece.text for piece in engine.stream(prompt, params)) == text


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, trtforge; 'Engine' in dir(trtforge) or exit(1)"
    code += "; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); trtforge.Engine"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_answering_imports_neither_transformers_nor_torchs_compiler(build: Path) -> None:
    """Each takes more than a second, and the request that needs it first would wait."""
    code = """
import sys
from trtforge import Engine, SamplingParams

with Engine.load(sys.argv[1]) as engine:
    for params in (SamplingParams(), SamplingParams(top_k=5, seed=1), SamplingParams(log_probs=True, bad=("a",))):
        assert engine.generate("Return the", params).usage.completion_tokens > 3
print(*{"torch._dynamo", "transformers", "sympy"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code, str(build)], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_bad_words_occur_neither_after_a_space_nor_without_one(engine: Engine) -> None:
    prompt, words = "Return the number of", ("the", "current")
    free = engine.generate(prompt, SamplingParams(max_tokens=40)).text
    assert all(word in free for word in words)
    text = engine.generate(prompt, SamplingParams(max_tokens=40, bad=words)).text
    assert not any(word in text for word in words)


@pytest.mark.parametrize("size", [1 << 24, "16MiB"])
def test_host_memory_for_kv_blocks(build: Path, size: int | str) -> None:
    words = "the list of items that are in the "
    with Engine.load(build, kv_cache_tokens=256, kv_cache_host_memory_bytes=size) as engine:
        assert engine.statistics().kv_host_blocks_max == 256  # of 64 KiB
        first = engine.generate(words * 20, SamplingParams(max_tokens=8))
        engine.generate("Return " + words * 20, SamplingParams(max_tokens=8))
        again = engine.generate(words * 20, SamplingParams(max_tokens=8))
    assert first.usage.reused_tokens == 0
    assert again.usage.reused_tokens > again.usage.prompt_tokens - 64
    assert again.tokens == first.tokens


def said(error: BaseException) -> str:
    """Its traceback."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(max_tokens="a"), "max_tokens is 'a'"),  # type: ignore[arg-type]
        (SamplingParams(max_tokens=float("nan")), "max_tokens is nan"),  # type: ignore[arg-type]
        (SamplingParams(max_tokens=None), "max_tokens is None"),  # type: ignore[arg-type]
        (SamplingParams(top_k="x"), "top_k is 'x'"),  # type: ignore[arg-type]
        (SamplingParams(temperature="hot", top_p=0.9), "temperature is 'hot'"),  # type: ignore[arg-type]
        (SamplingParams(seed="a", top_k=5), "seed is 'a'"),  # type: ignore[arg-type]
        (SamplingParams(priority="high"), "priority is 'high'"),  # type: ignore[arg-type]
        (SamplingParams(kv_retention=80), "kv_retention is 80"),  # type: ignore[arg-type]
        (SamplingParams(kv_retention=KvCacheRetention([("a", 80)])), "kv_retention is KvCacheRetention(ranges="),  # type: ignore[list-item]
        (
            SamplingParams(kv_retention=KvCacheRetention([TokenRangeRetention(0, None, "high")])),  # type: ignore[arg-type]
            "kv_retention is KvCacheRetention(ranges=",
        ),
        (
            SamplingParams(kv_retention=KvCacheRetention([TokenRangeRetention(0, None, 101)])),
            "priority of kv_retention is 101; it must be a whole number from 0 to 100",
        ),
        (SamplingParams(cache_salt=""), "cache_salt is ''"),
        (SamplingParams(cache_salt="a" * 1025), "cache_salt is 'aaa"),
        (SamplingParams(stop="abc"), "stop is 'abc'"),
        (SamplingParams(min_tokens=-1), "min_tokens is -1"),
        (SamplingParams(top_p=0.9, top_p_reset_id=2048), "top_p_reset_id is 2048"),
        (SamplingParams(top_p=0.9, top_p_reset_id=-2), "top_p_reset_id is -2"),
        (SamplingParams(logit_bias={3: 1e39}), "logit_bias of token 3 is 1e+39"),
        (SamplingParams(stop=("a", "")), "a stop text is empty"),
        (SamplingParams(draft_input_ids="a"), "draft_input_ids is 'a'"),  # type: ignore[arg-type]
        (SamplingParams(draft_input_ids=[-1]), "draft_input_ids is [-1]"),
        (SamplingParams(draft_input_ids=[2048]), "draft_input_ids holds token ids outside of the vocabulary of 2048"),
        (SamplingParams(draft_acceptance_threshold=0.5), "draft_input_ids is empty"),
        (SamplingParams(draft_input_ids=[1], draft_acceptance_threshold=2), "draft_acceptance_threshold is 2"),
        (SamplingParams(draft_input_ids=[1], draft_logits=[[1.0, 2.0]]), "draft_logits has the shape (1, 2)"),
        (SamplingParams(draft_input_ids=[1], draft_logits="abc"), "draft_logits is not an array: could not convert"),
        (
            SamplingParams(draft_input_ids=[1], draft_logits=[[math.nan] * 2048]),
            "draft_logits has values that are not finite",
        ),
        ({"max_tokens": 3}, "is not a SamplingParams"),
        (None, "None is not a SamplingParams"),
    ],
)
def test_values_of_other_types_are_refused_alone(engine: Engine, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.generate(PROMPT, params)
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        list(engine.stream(PROMPT, params))
    assert sys.version_info < (3, 11) or f"hint: {caught.value.hint}" in said(caught.value)
    assert engine.generate(PROMPT, SamplingParams(max_tokens=2)).usage.completion_tokens == 2


def test_a_directory_of_builds_is_not_loaded(build: Path) -> None:
    with pytest.raises(ForgeError, match=f"{build.parent} is not a build: it holds the build build") as caught:
        Engine.load(build.parent)
    assert caught.value.hint == f"Give one of them, such as {build}."


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "5 is not a prompt"),
        (b"abc", "b'abc' is not a prompt"),
        ((text for text in ("a", "b")), "<generator object .* is not a prompt"),
        ("\ud800", "a lone surrogate"),
        (Tokens([-1]), "outside of any vocabulary"),
        (Tokens([2**70]), "outside of any vocabulary"),
        (Tokens(["a"]), "the prompt's token ids"),  # type: ignore[list-item]
        (Tokens([1.5]), "the prompt's token ids"),  # type: ignore[list-item]
        (Tokens([[5, 6]]), "the prompt's token ids"),  # type: ignore[list-item]
    ],
)
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads"),
        ({"threads": 10**6}, "threads"),
        ({"threads": "2"}, "threads: Input should be a valid integer"),
        ({"max_batch_size": 4.0}, "max_batch_size: Input should be a valid integer"),
        ({"max_batch_size": True}, "max_batch_size: Input should be a valid integer"),
        ({"kv_reuse": "no"}, "kv_reuse: Input should be a valid boolean"),
        ({"chunked_context": 1}, "chunked_context: Input should be a valid boolean"),
        ({"kv_cache_fraction": "0.5"}, "kv_cache_fraction: Input should be a valid number"),
        ({"kv_cache_dir": ""}, "kv_cache_dir: Input should not be empty"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_num_tokens": 0}, "max_num_tokens"),
        ({"scheduler": "foo"}, "scheduler"),
        ({"kv_cache_fraction": 2}, "kv_cache_fraction"),
        ({"kv_cache_fraction": b"half"}, "kv_cache_fraction"),
        ({"kv_cache_tokens": -1}, "kv_cache_tokens"),
        ({"kv_cache_host_memory_bytes": "16 apples"}, "kv_cache_host_memory_bytes: not a size"),
        ({"kv_cache_host_memory_bytes": -1}, "kv_cache_host_memory_bytes"),
        ({"kv_cache_host_memory_bytes": 2**63}, "kv_cache_host_memory_bytes"),
        ({"kv_cache_dir_bytes": -1}, "kv_cache_dir_bytes"),
        ({"kv_cache_dir_bytes": "0GB"}, "kv_cache_dir_bytes"),
        ({"kv_cache_dir": "\ud800"}, "kv_cache_dir"),
        ({"trace": "a\0b"}, "trace: it contains a null character"),
        ({"directory": None}, "directory: Input is not a valid path"),
        ({"directory": b"engine"}, "directory: Input is not a valid path"),
    ],
)
def test_wrong_options_of_load_are_named(build: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=rf"Engine\.load: {message}"):
        Engine.load(**{"directory": build, **options})


def test_tokens_that_end_an_answer_are_no_part_of_it(engine: Engine) -> None:
    whole = engine.generate(PROMPT, SamplingParams(max_tokens=12, ignore_end=True))
    at = next(index for index in range(3, 12) if whole.tokens[index] not in whole.tokens[:index])
    for ignored in (False, True):
        ended = engine.generate(
            PROMPT, SamplingParams(max_tokens=12, ignore_end=ignored, stop_token_ids=[whole.tokens[at]])
        )
        assert (ended.tokens, ended.finish_reason) == (whole.tokens[:at], "stop")
    beyond = SamplingParams(stop_token_ids=[engine.vocab_size])
    with pytest.raises(RequestError, match=f"stop_token_ids has {engine.vocab_size}, the vocabulary has"):
        engine.generate(PROMPT, beyond)
    with pytest.raises(RequestError, match="a bad word is empty"):
        engine.generate(PROMPT, SamplingParams(bad=["a", ""]))


def test_larger_limits_than_the_engines_have_no_effect(build: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine.load(
        build, kv_cache_tokens=512, max_batch_size=np.int64(1000), max_num_tokens=10**6, kv_reuse=np.bool_(True)
    ) as engine:
        own = engine.statistics().max_requests
    assert own < 1000
    assert caplog.messages[0] == f"max_batch_size 1000 has no effect: the engine's is {own}"
    assert caplog.messages[1].startswith("max_num_tokens 1000000 has no effect: the engine's is ")


def test_limits_of_load_are_lower_than_the_engines(build: Path) -> None:
    """A prompt of 40 tokens takes five steps of 8, and its first token comes with the last of them."""
    with Engine.load(build, kv_cache_tokens=512, max_num_tokens=8, max_batch_size=2, chunked_context=True) as engine:
        engine.generate(Tokens(range(100, 140)), SamplingParams(max_tokens=3, ignore_end=True))
        found = engine.statistics()
    assert (found.iterations, found.max_requests) == (5 + 2, 2)
    with (
        Engine.load(build, kv_cache_tokens=512, max_num_tokens=8, chunked_context=False) as engine,
        pytest.raises(RequestError, match="the prompt has 40 tokens, max_num_tokens is 8"),
    ):
        engine.generate(Tokens(range(100, 140)))


def test_an_answer_is_that_of_the_command(engine: Engine, build: Path, tokenizer: Tokenizer) -> None:
    expected = generate_text(build / "engine", PROMPT, max_tokens=24, sampling=EngineSampling())
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=24))
    assert (answer.text, answer.tokens) == (expected.text, expected.tokens)
    assert answer.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT).ids)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.log_probs == ()


def test_streams_and_prompts_together_give_the_same(engine: Engine, tokenizer: Tokenizer) -> None:
    params = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, top_p=0.9, temperature=1.5, seed=4)]
    ids = Tokens(tokenizer.encode(PROMPT).ids)
    together = engine.generate([PROMPT, ids], params)
    for answer, alone in zip(
        together, (engine.generate(PROMPT, params[0]), engine.generate(ids, params[1])), strict=True
    ):
        assert (answer.text, answer.tokens, answer.finish_reason) == (alone.text, alone.tokens, alone.finish_reason)

    async def streamed(prompt: str | Tokens, of: SamplingParams) -> list[Piece]:
        return [piece async for piece in engine.astream(prompt, of)]

    async def both() -> list[list[Piece]]:
        return await asyncio.gather(streamed(PROMPT, params[0]), streamed(ids, params[1]))

    for answer, pieces in zip(together, asyncio.run(both()), strict=True):
        assert len(pieces) > 5
        assert "".join(piece.text for piece in pieces) == answer.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == answer.finish_reason


def test_the_runtime_learns_whether_tokens_are_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params, submit = SamplingParams(max_tokens=2), engine._runtime.submit
    streamed: list[bool] = []

    def noted(*requests: tuple[GenerationRequest, OnOutput]) -> None:
        streamed.extend(request.streamed for request, _ in requests)
        submit(*requests)

    async def every() -> None:
        await engine.agenerate(PROMPT, params)
        assert [piece async for piece in engine.astream(PROMPT, params)]

    monkeypatch.setattr(engine._runtime, "submit", noted)
    engine.generate([PROMPT, PROMPT], params)
    assert list(engine.stream(PROMPT, params))
    asyncio.run(every())
    assert streamed == [False, False, True, False, True]


def test_messages_are_rendered_as_transformers_does(engine: Engine) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    params = SamplingParams(max_tokens=12)
    assert engine.generate(Chat(MESSAGES), params).tokens == engine.generate(Tokens(ids), params).tokens


class _Answering:
    """A runtime that answers every request with the same tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(tokens_per_block=16)

    def submit(self, *requests: tuple[GenerationRequest, OnOutput]) -> None:
        for request, on_output in requests:
            on_output(Output(request.request_id, self._tokens))
            on_output(Output(request.request_id, (), "end_id"))

    def close(self) -> None: ...


def test_the_answer_to_messages_begins_as_a_text_does(tmp_path: Path) -> None:
    """As from the server: SentencePiece's first token loses its space, unless the text goes on after a prompt's."""
    tokenizer = TOKENIZERS["metaspace"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    tokens = tuple(tokenizer.encode("the world", add_special_tokens=False).ids)
    runtime: Any = _Answering(tokens)
    engine = Engine(runtime, Prompts(tmp_path, 2048))
    answers = engine.generate([Chat(MESSAGES), "Hello", Tokens(tokens)])
    assert [answer.text for answer in answers] == ["the world", " the world", " the world"]


def test_text_ends_before_a_stop_word_wherever_tokens_end(engine: Engine) -> None:
    whole = engine.generate(PROMPT, SamplingParams(max_tokens=40)).text
    word = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=40, stop=[word]))
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"
    assert engine.generate([PROMPT] * 2, SamplingParams(max_tokens=40, stop=[word]))[1].text == answer.text
    assert eventually(lambda: engine.statistics().kv_blocks_used == 0)


def _forced(tokens: list[int]) -> Callable[..., None]:
    """A logits processor that lets nothing but these tokens come after the prompt."""
    starts: dict[int, int] = {}

    def process(request: int, logits: Any, ids: list[list[int]], stream: None, client: None) -> None:
        made = len(ids[0]) - starts.setdefault(request, len(ids[0]))
        logits[..., :] = -math.inf
        logits[..., tokens[made]] = 0.0

    return process


@pytest.mark.parametrize(
    ("parser", "end", "text", "reasoning", "rest"),
    [
        ("qwen3", "", "<think>\nI count.\n</think>\n\nThree.", "I count.", "Three."),
        ("qwen3", "<think>\n", "I count.</think>Three.", "I count.", "Three."),
        ("deepseek-r1", "<think>\n", "I count.</think>Three.", "I count.", "Three."),
        ("qwen3", "", "Three.", "", "Three."),
        ("deepseek-r1", "</think>", "Three.", "", "Three."),
        ("deepseek-r1", "<think>", "I count", "I count", ""),
        (None, "", "<think>I count.</think>Three.", None, "<think>I count.</think>Three."),
        (
            None,
            "",
            "<|channel|>analysis<|message|>I count.<|channel|>final<|message|>Three.",
            "I count.",
            "Three.",
        ),
    ],
)
def test_reasoning_is_apart_from_the_text(
    engine: Engine,
    tokenizer: Tokenizer,
    parser: Any,
    end: str,
    text: str,
    reasoning: str | None,
    rest: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`end`: of the prompt, which tells whether the answer begins with reasoning."""
    template = ChatTemplate(f"{{{{ messages[0].content }}}}\nassistant\n{{{{ {end!r} }}}}")
    monkeypatch.setitem(vars(engine._prompts), "_template", template)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    params = SamplingParams(len(tokens), reasoning_parser=parser, logits_processor=_forced(tokens), n=2, top_k=1)
    answer = engine.generate(Chat(MESSAGES), params)
    assert (answer.reasoning, answer.text, answer.tokens) == (reasoning, rest, tuple(tokens))
    assert [each.reasoning for each in answer.completions] == [reasoning] * 2
    pieces = list(engine.stream(Chat(MESSAGES), params))
    for index in range(2):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.reasoning for piece in own) == (reasoning or "")
        assert "".join(piece.text for piece in own) == rest


def test_a_guided_answer_has_no_reasoning(engine: Engine) -> None:
    params = SamplingParams(32, regex="ab</think>c", reasoning_parser="deepseek-r1")
    answer = engine.generate(Chat(MESSAGES), params)
    assert (answer.reasoning, answer.text) == (None, "ab</think>c")


def test_scores_belong_to_the_tokens(engine: Engine, tokenizer: Tokenizer) -> None:
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=6, top_log_probs=3))
    assert tuple(score.token for score in answer.log_probs) == answer.tokens
    for score in answer.log_probs:
        assert score.text == tokenizer.decode([score.token], skip_special_tokens=False)
        assert [top.log_prob for top in score.top] == sorted((top.log_prob for top in score.top), reverse=True)
        assert (score.top[0].token, score.top[0].log_prob) == (score.token, score.log_prob)  # greedy
    assert answer.cumulative_log_prob == pytest.approx(sum(score.log_prob for score in answer.log_probs))


def test_guided_answers_follow_their_schema(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    for given in (schema, json.dumps(schema)):
        assert json.loads(engine.generate(PROMPT, SamplingParams(json_schema=given)).text)["n"] in range(10)
    assert engine.generate(PROMPT, SamplingParams(grammar='root ::= "a" "b"')).text == "ab"
    with pytest.raises(RequestError, match="json_schema is not JSON: Object of type set"):
        engine.generate(PROMPT, SamplingParams(json_schema={"enum": {1, 2}}))
    with pytest.raises(RequestError, match="more than one of json_schema, regex and grammar"):
        engine.generate(PROMPT, SamplingParams(regex="a", grammar="root ::= []"))


def test_a_closed_stream_cancels_its_request(engine: Engine) -> None:
    stream = engine.stream(PROMPT, SamplingParams(max_tokens=200, ignore_end=True))
    next(stream)
    stream.close()

    async def leave() -> None:
        async with aclosing(engine.astream(PROMPT, SamplingParams(max_tokens=200, ignore_end=True))) as pieces:
            assert (await anext(pieces)).finish_reason is None

    asyncio.run(leave())
    assert engine.generate(PROMPT, SamplingParams(max_tokens=2)).usage.completion_tokens == 2
    assert eventually(lambda: engine.statistics().active_requests == 0)


def test_a_refusal_is_raised_and_ends_the_others(engine: Engine) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.generate([PROMPT, Tokens([])], SamplingParams(max_tokens=200))
    with pytest.raises(RequestError, match="there are 2 prompts and 1 SamplingParams"):
        engine.generate([PROMPT, PROMPT], [SamplingParams()])
    assert engine.generate(PROMPT, SamplingParams(max_tokens=1)).usage.completion_tokens == 1
    assert eventually(lambda: engine.statistics().active_requests == 0)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ cycler() }}", "refuses the messages: at least one item has to be provided"),
        ("{{ 1 // 0 }}", "refuses the messages: integer division or modulo by zero"),
        (None, "has no chat template"),
    ],
)
def test_messages_that_no_prompt_is_made_of_are_refused(tmp_path: Path, template: str | None, said: str) -> None:
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=said):
        Prompts(tmp_path, 2048).request(Chat(MESSAGES), SamplingParams())


def test_calls_of_strict_functions_have_a_guide(tmp_path: Path) -> None:
    write_tokenizer(CALLING, tmp_path)
    shutil.copyfile(DEMO_MODEL / "generation_config.json", tmp_path / "generation_config.json")
    function = {"name": "weather", "parameters": {"properties": {"city": {"const": "Rome"}}, "required": ["city"]}}
    strict, free = ({"type": "function", "function": {**function, "strict": each}} for each in (True, False))
    prompts = Prompts(tmp_path, 2048)

    def guide(prompt: Any, **options: Any) -> Guide | None:
        return prompts.request(prompt, SamplingParams(**options)).guide

    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    compiled = Grammars(DEMO_MODEL, 2048).compiled(guide(Chat(MESSAGES, [strict])) or Guide("json"))
    for text, allowed in ((called, True), ("Sunny.", True), (called.replace("Rome", "Oslo"), False)):
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[1])
        assert (matcher.accept_string(text) and matcher.is_completed()) is allowed
    table = torch.zeros(2, 8)
    assert guide(Tuned(Chat(MESSAGES, [strict]), table)) == guide(Chat(MESSAGES, [strict]))
    assert guide(Chat(MESSAGES, [free])) is guide(Chat(MESSAGES)) is guide("Hello") is None
    assert guide(Chat(MESSAGES, [strict]), beam_width=2) is guide(Chat(MESSAGES, [strict]), ignore_end=True) is None
    assert guide(Chat(MESSAGES, [strict]), regex="a") == Guide("regex", "a")


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ c.id }}<|tool_call_begin|>", "functions.look:0<|tool_call_begin|>"),
        ("{{ 'I ' + c.function.arguments }}", 'I {"at": "ä"}'),
    ],
)
def test_earlier_calls_are_shown_as_the_template_takes_them(template: str, shown: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    source = f"{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{template}{{% endfor %}}{{% endfor %}}"
    (tmp_path / "chat_template.jinja").write_text(source)
    prompts = Prompts(tmp_path, 2048)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "ä"}}}
    made = prompts.request(Chat([{"role": "assistant", "content": "", "tool_calls": [call]}]), SamplingParams())
    assert list(made.prompt) == prompts.tokenizer.encode(shown, add_special_tokens=False).ids


def test_functions_need_no_description_for_gpt_oss(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    source = "{% for t in tools or [] %}{{ t.function.name + ':' + t.function.description }}{% endfor %}<|channel|>"
    (tmp_path / "chat_template.jinja").write_text(source)
    prompts = Prompts(tmp_path, 2048)
    tools = [{"type": "function", "function": {"name": "look"}}]
    made = prompts.request(Chat(MESSAGES, tools), SamplingParams())
    assert list(made.prompt) == prompts.tokenizer.encode("look:<|channel|>", add_special_tokens=False).ids


def test_a_reused_prefix_is_counted(build: Path) -> None:
    text = (DEMO_MODEL / "heldout.txt").read_text().replace("\f", " ")[:400]
    with Engine.load(str(build / "engine"), kv_cache_tokens=1024, threads=1) as engine:
        first, second = (engine.generate(text, SamplingParams(max_tokens=1)).usage for _ in range(2))
    assert first == Usage(first.prompt_tokens, 1, 0)
    assert 0 < second.reused_tokens < second.prompt_tokens
    with pytest.raises(ForgeError, match="the engine is closed"):
        engine.generate(PROMPT)


def test_an_engine_that_is_dropped_ends_and_frees_its_memory(build: Path) -> None:
    """Without waiting for the garbage collector, which does not know how much memory tensors take."""
    gc.disable()
    try:
        engine = Engine.load(build, kv_cache_tokens=1024)
        engine.generate(PROMPT, SamplingParams(max_tokens=2))
        runtime, thread = weakref.ref(engine._runtime), engine._runtime._thread
        ranks = weakref.ref(engine._runtime._ranks)
        tokenizer = weakref.ref(engine._prompts.tokenizer)
        del engine
        assert not thread.is_alive()
        assert (runtime(), ranks(), tokenizer()) == (None, None, None)
    finally:
        gc.enable()


def test_an_engine_that_is_closed_frees_its_memory_while_it_is_still_known(build: Path) -> None:
    gc.disable()
    try:
        with Engine.load(build, kv_cache_tokens=1024) as engine:
            answer = engine.generate(PROMPT, SamplingParams(max_tokens=2))
            model = weakref.ref(engine._runtime._ranks._model)
            assert model() is not None
        assert model() is None
        assert engine.statistics().generated_tokens == len(answer.tokens)
    finally:
        gc.enable()


def test_an_engine_is_not_pickled(engine: Engine) -> None:
    with pytest.raises(ForgeError, match="an engine cannot be pickled") as caught:
        pickle.dumps(engine)
    assert caught.value.hint == "Load it in the process that uses it."


def test_a_repository_stands_for_its_engine(build: Path, tmp_path: Path) -> None:
    package(PackageConfig(), build / "engine", None, tmp_path / "repository")
    with Engine.load(tmp_path / "repository", kv_cache_tokens=1024) as engine:
        assert engine.generate(PROMPT, SamplingParams(max_tokens=2)).usage.completion_tokens == 2


def test_a_directory_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError) as caught:
        Engine.load(tmp_path)
    assert sys.version_info < (3, 11) or "\nhint: Give a checkpoint or engine directory." in said(caught.value)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_the_pages_snippets_run(
    number: int,
    build: Path,
    beams: Path,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "beams").symlink_to(beams)
    (tmp_path / "build" / "tables").symlink_to(tables)
    (tmp_path / "build" / "demo-int4awq").symlink_to(build)
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"{PAGE.name}, example {number + 1}", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.strip()) > 5
