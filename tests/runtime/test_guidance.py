"""Guided decoding: what the demo model writes follows schemas, expressions and grammars, however it is scheduled."""

import json
import math
import queue
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE
from tests.runtime.schemas import random_schemas
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import RequestError
from trtforge.core.extras import install_command
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import DraftTokens, GenerationRequest, Guide, GuideKind, Output, SamplingParams
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import Generation, generate_with
from trtforge.runtime.guidance.grammars import Grammars

SCHEMAS = 200
LONGEST = 400  # tokens of the longest instance of such a schema, and some more
END_IDS = frozenset((1, 3))  # of the demo model's generation_config.json
SAMPLED = SamplingParams(temperature=1.2, top_p=1.0)
TEXT = (DEMO_MODEL / "heldout.txt").read_text().replace("\f", " ")
NAME = Guide(
    "json_schema",
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}',
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(ConvertConfig(dtype="float32"), DEMO_MODEL, tmp_path_factory.mktemp("guided") / "checkpoint").path


@pytest.fixture(scope="module")
def directory(checkpoint: Path) -> Path:
    return compile_engine(EngineConfig(backend="torch"), checkpoint, checkpoint.parent / "engine").path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine.load(directory) as engine:
        yield engine


def request(tokenizer: Tokenizer, guide: Guide | None, number: int = 0, **changes: Any) -> GenerationRequest:
    """A request with a prompt of its own."""
    prompt = tuple(tokenizer.encode(TEXT[number * 300 :][: 40 + number % 90]).ids)
    return replace(GenerationRequest("", prompt, LONGEST, end_ids=END_IDS, guide=guide), **changes)


def mixed(tokenizer: Tokenizer, count: int) -> list[GenerationRequest]:
    """A request for each of `count` schemas, one in three greedy, and now and then one without a schema."""
    found = []
    for number, schema in enumerate(random_schemas(count)):
        sampling = SamplingParams() if number % 3 == 0 else replace(SAMPLED, seed=number)
        found.append(request(tokenizer, Guide("json_schema", schema), number, sampling=sampling))
        if number % 8 == 7:
            found.append(request(tokenizer, None, number, sampling=sampling, max_tokens=20))
    return found


def require_valid(tokenizer: Tokenizer, asked: GenerationRequest, answer: Generation) -> None:
    if asked.guide is not None:
        assert answer.finish_reason == "end_id", (asked.guide, answer)
        jsonschema.validate(json.loads(tokenizer.decode(answer.tokens)), json.loads(asked.guide.text))


def test_answers_to_200_random_schemas_are_valid(engine: Engine, tokenizer: Tokenizer) -> None:
    asked = mixed(tokenizer, SCHEMAS)
    assert len({each.guide for each in asked if each.guide is not None}) == SCHEMAS
    for each, answer in zip(asked, generate_with(engine, asked), strict=True):
        require_valid(tokenizer, each, answer)
    assert engine.statistics().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (EngineOptions(scheduler="max_utilization", kv_cache_tokens=128), {"tokens_per_block": 8}),
        (EngineOptions(chunked_context=True), {"max_batch_size": 8, "max_num_tokens": 32}),
    ],
    ids=["paused", "chunked"],
)
def test_scheduling_does_not_change_guided_answers(
    checkpoint: Path,
    engine: Engine,
    tokenizer: Tokenizer,
    tmp_path: Path,
    options: EngineOptions,
    limits: dict[str, int],
) -> None:
    config = EngineConfig.model_validate({"backend": "torch", **limits})
    directory = compile_engine(config, checkpoint, tmp_path / "engine").path
    asked = [replace(each, max_tokens=min(each.max_tokens, 100)) for each in mixed(tokenizer, 16)]
    with Engine.load(directory, options) as other:
        answers = generate_with(other, asked)
        assert (other.statistics().paused_requests > 0) == (options.scheduler == "max_utilization")
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in generate_with(engine, asked)]


def test_drafts_of_a_client_change_no_guided_answer(engine: Engine, tokenizer: Tokenizer) -> None:
    """Drafts that are right, and drafts that the guide rules out."""
    asked = [each for each in mixed(tokenizer, 12) if each.guide is not None]
    answers = generate_with(engine, asked)
    for keeps in (20, 6, 0):
        drafts = [DraftTokens((*answer.tokens[:keeps], 5, 6)) for answer in answers]
        drafted = generate_with(engine, [replace(each, drafts=own) for each, own in zip(asked, drafts, strict=True)])
        assert [each.tokens for each in drafted] == [each.tokens for each in answers]
        assert all(each.accepted_tokens >= min(keeps, len(each.tokens)) for each in drafted)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_ranks_together_give_valid_answers(tokenizer: Tokenizer, tmp_path: Path, layout: dict[str, int]) -> None:
    config = ConvertConfig.model_validate({"dtype": "float32", **layout})
    checkpoint = convert(config, DEMO_MODEL, tmp_path / "checkpoint").path
    asked = mixed(tokenizer, 8)
    with Engine.load(compile_engine(EngineConfig(backend="torch"), checkpoint, tmp_path / "engine").path) as engine:
        for each, answer in zip(asked, generate_with(engine, asked), strict=True):
            require_valid(tokenizer, each, answer)


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        (Guide("regex", "[A-Z][a-z]{2,5} [0-9]{4}"), r"[A-Z][a-z]{2,5} [0-9]{4}"),
        (Guide("ebnf_grammar", 'root ::= "yes" | "no" word\nword ::= " " [a-z] [a-z]'), r"yes|no [a-z]{2}"),
        (
            Guide(
                "structural_tag",
                json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {
                            "type": "tag",
                            "begin": "<call>",
                            "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
                            "end": "</call>",
                        },
                    }
                ),
            ),
            r"<call>(true|false)</call>",
        ),
    ],
    ids=["regex", "grammar", "structural-tag"],
)
@pytest.mark.parametrize("sampling", [SamplingParams(), replace(SAMPLED, seed=3)], ids=["greedy", "sampled"])
def test_an_answer_is_what_the_guide_describes(
    engine: Engine, tokenizer: Tokenizer, guide: Guide, pattern: str, sampling: SamplingParams
) -> None:
    (answer,) = generate_with(engine, [request(tokenizer, guide, sampling=sampling)])
    assert answer.finish_reason == "end_id"
    assert re.fullmatch(pattern, tokenizer.decode(answer.tokens))


def test_json_without_a_schema_is_any_json(engine: Engine, tokenizer: Tokenizer) -> None:
    sampled = [replace(SAMPLED, seed=number) for number in range(8)]
    asked = [request(tokenizer, Guide("json"), each.seed or 0, sampling=each, max_tokens=120) for each in sampled]
    done = [answer for answer in generate_with(engine, asked) if answer.finish_reason == "end_id"]
    assert done
    for answer in done:
        json.loads(tokenizer.decode(answer.tokens))


def test_log_probs_are_those_of_the_tokens_that_the_guide_allows(engine: Engine, tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(return_log_probs=True, top_log_probs=20)
    (answer,) = generate_with(engine, [request(tokenizer, Guide("regex", "yes|no"), sampling=sampling)])
    texts = [{tokenizer.decode([token]) for token, _ in top} for top in answer.top_log_probs]
    assert texts[0] <= {"y", "ye", "yes", "n", "no"}
    for top in answer.top_log_probs:
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-5)
    assert answer.cumulative_log_prob == pytest.approx(sum(answer.log_probs))


@pytest.mark.parametrize(
    ("kind", "text", "message", "hint"),
    [
        ("json_schema", '{"type": ', r"the guide of type json_schema: not JSON", "Correct the JSON schema"),
        ("json_schema", '{"type": "nope"}', r'refused: #: Unsupported type "nope"$', "Correct the JSON schema"),
        ("json_schema", "[" * 500 + "]" * 500, r"nested|deep", "Correct the JSON schema"),
        ("json_schema", '{"$ref": "#/missing"}', r"refused: #: Cannot find field missing", "Correct the JSON schema"),
        ("regex", "a(", r"refused: The parenthesis is not closed", "Correct the regular expression"),
        ("regex", "[z-a]", r"refused: Invalid character range .*\[z-a\]$", "Correct the regular expression"),
        (
            "regex",
            "a|*b",
            r"refused: \* in a regular expression has nothing to repeat",
            "Correct the regular expression",
        ),
        ("regex", "(" * 201 + ")" * 201, r"more than 200 nested brackets", "Correct the regular expression"),
        ("regex", "a" * 200_000, r"has 200000 characters, at most 131072", "Ask for a smaller structure"),
        ("ebnf_grammar", "root ::= nobody", r'Rule "nobody" is not defined', "rules `name ::= ...`"),
        ("structural_tag", "{}", r"Structural tag must have a format field", "an object with type structural_tag"),
        ("json", "{}", r"a guide of type json has no text", "For a schema, use type json_schema"),
        ("xml", "<a/>", r"the guide is of type 'xml'", "Give one of json, json_schema"),
    ],
)
def test_a_wrong_guide_fails_its_own_request_only(
    engine: Engine, tokenizer: Tokenizer, kind: GuideKind, text: str, message: str, hint: str
) -> None:
    asked = [
        request(tokenizer, Guide(kind, text)),
        request(tokenizer, NAME, 1),
        request(tokenizer, None, 2, max_tokens=4),
    ]
    wrong, right, free = generate_with(engine, asked)
    assert wrong.finish_reason == "error"
    assert isinstance(wrong.error, RequestError)
    assert re.search(message, wrong.error.message)
    assert hint in wrong.error.hint
    assert right.finish_reason == "end_id"
    assert free.error is None


def test_without_an_end_id_a_guide_is_refused(engine: Engine, tokenizer: Tokenizer) -> None:
    (answer,) = generate_with(engine, [request(tokenizer, NAME, end_ids=frozenset())])
    assert answer.error is not None
    assert answer.error.message.startswith("guided decoding needs an end id")


def test_end_ids_that_are_no_tokens_end_nothing(engine: Engine, tokenizer: Tokenizer) -> None:
    """Also of a guide that is known, which is prepared on the engine's own thread."""
    for _ in range(2):
        none, some = (request(tokenizer, NAME, end_ids=frozenset(ids)) for ids in ((-1, 99999), (1, 99999)))
        refused, answer = generate_with(engine, [none, some])
        assert refused.error is not None
        assert refused.error.message.startswith("guided decoding needs an end id")
        assert answer.finish_reason == "end_id"


@pytest.mark.parametrize(
    ("expression", "end_text"),
    [
        ("[a-z]{6}", "[a-z]+"),
        ("[a-z]{2,9}( [0-9]{1,3})*", "[a-z]+| ?[0-9]"),
        ("[a-z ]{9}!", "[a-z]+"),
        ("[0-9]{4}", "[0-4]"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_end_ids_with_text_end_an_answer_where_its_guide_ends(
    engine: Engine, tokenizer: Tokenizer, expression: str, end_text: str, seed: int
) -> None:
    texts = {token: tokenizer.decode([token]) for token in range(2048)}
    fitting = sorted(token for token, text in texts.items() if re.fullmatch(end_text, text))
    ends = frozenset(random.Random(seed).sample(fitting, min(50, len(fitting) // 2)))
    sampling = SamplingParams(top_p=0.99, temperature=3.0, seed=seed)
    asked = [
        request(tokenizer, Guide("regex", expression), number, end_ids=ends, sampling=sampling) for number in range(6)
    ]
    for answer in generate_with(engine, asked):
        assert answer.error is None
        assert answer.finish_reason == "end_id"
        assert re.fullmatch(expression, tokenizer.decode(answer.tokens))


@pytest.mark.parametrize("changes", [{"bad_words": "yes"}, {"sampling": SamplingParams(min_tokens=50)}])
def test_a_guide_without_a_way_on_ends_its_request(
    engine: Engine, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    if "bad_words" in changes:
        banned = [token for text, token in tokenizer.get_vocab().items() if text in ("y", "ye", "yes")]
        changes = {"bad_words": tuple((token,) for token in banned)}
    stuck = request(tokenizer, Guide("regex", "yes"), **changes)
    answer, other = generate_with(engine, [stuck, request(tokenizer, NAME, 1)])
    assert answer.error is not None
    assert answer.error.message == "the guide and the other options together exclude all tokens"
    assert other.finish_reason == "end_id"
    assert engine.statistics().kv_blocks_used == 0


@pytest.mark.parametrize("greedy", [True, False])
def test_options_that_leave_no_token_end_their_request(engine: Engine, tokenizer: Tokenizer, greedy: bool) -> None:
    bias = [-math.inf] * 2048
    bias[300] = 0.0
    sampling = SamplingParams(embedding_bias=bias, top_p=None if greedy else 0.9)
    free, stuck = (
        request(tokenizer, None, sampling=sampling, max_tokens=3),
        request(tokenizer, None, sampling=sampling, max_tokens=3, bad_words=((300, 300),)),
    )
    answers = generate_with(engine, [free, stuck])
    assert answers[0].tokens == (300, 300, 300)
    assert answers[1].tokens == (300,)
    assert answers[1].error is not None
    assert answers[1].error.message == "the options of the request exclude all tokens"


def test_a_guide_that_is_slow_to_follow_ends_its_request(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.runtime.guidance.guides._LONGEST_STEP", -1.0)
    slow, free = generate_with(engine, [request(tokenizer, NAME), request(tokenizer, None, 1, max_tokens=6)])
    assert slow.error is not None
    assert slow.error.message == "the guide takes too long to check at each token"
    assert len(slow.tokens) == 1  # of the step that took long
    assert len(free.tokens) == 6
    monkeypatch.undo()
    assert generate_with(engine, [request(tokenizer, NAME)])[0].finish_reason == "end_id"


def test_without_the_package_a_guide_is_refused_with_the_command(
    directory: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.runtime.guidance.grammars.find_spec", lambda name: None)
    with Engine.load(directory) as engine:
        wrong, free = generate_with(engine, [request(tokenizer, NAME), request(tokenizer, None, 1, max_tokens=4)])
    assert wrong.error is not None
    assert wrong.error.message == "guided decoding needs the package xgrammar, which is not installed here"
    assert wrong.error.hint == f"Run `{install_command('guided')}`."
    assert len(free.tokens) == 4


def test_a_grammar_is_compiled_once_and_the_engine_goes_on_meanwhile(
    directory: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Guide] = []
    held = threading.Event()
    compile_one = Grammars._compile

    def slowly(self: Grammars, guide: Guide) -> object:
        compiled.append(guide)
        assert held.wait(PATIENCE)
        return compile_one(self, guide)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    with Engine.load(directory) as engine:
        for number in range(4):
            engine.submit((replace(request(tokenizer, NAME, number), request_id=f"guided {number}"), outputs.put))
        engine.submit((replace(request(tokenizer, None, max_tokens=3), request_id="free"), outputs.put))
        assert [outputs.get(timeout=PATIENCE).request_id for _ in range(3)] == ["free"] * 3
        assert engine.figures()["preparing"] == 4
        engine.cancel("guided 3")
        cancelled = outputs.get(timeout=PATIENCE)
        assert engine.figures()["preparing"] == 3
        assert (cancelled.request_id, cancelled.finish_reason) == ("guided 3", "cancelled")
        held.set()
        ended: set[str] = set()
        while len(ended) < 3:
            output = outputs.get(timeout=PATIENCE)
            if output.finish_reason is not None:
                assert output.finish_reason == "end_id"
                ended.add(output.request_id)
        assert ended == {"guided 0", "guided 1", "guided 2"}
        assert engine.statistics().active_requests == 0
        assert engine.figures()["preparing"] == 0
        assert engine._guides._places == {}
    assert compiled == [NAME]


def test_grammars_are_dropped_the_least_recently_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.runtime.guidance.grammars._MOST_KEPT", 2)
    grammars = Grammars(DEMO_MODEL, 2048)
    first, second, third = (Guide("regex", text) for text in "abc")
    kept = [grammars.compiled(guide) for guide in (first, second)]
    assert grammars.compiled(first) is kept[0]
    grammars.compiled(third)
    assert [grammars.found(guide) is not None for guide in (first, second, third)] == [True, False, True]


def test_special_tokens_are_never_part_of_a_guided_answer(tokenizer: Tokenizer) -> None:
    import xgrammar

    grammar = Grammars(DEMO_MODEL, 2048).compiled(Guide("regex", "[\\s\\S]*"))
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=sorted(END_IDS))
    mask = xgrammar.allocate_token_bitmask(1, 2048)
    matcher.fill_next_token_bitmask(mask)
    logits = torch.zeros(1, 2048)
    xgrammar.apply_token_bitmask_inplace(logits, mask, vocab_size=2048)
    refused = set(torch.isinf(logits[0]).nonzero().flatten().tolist())
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    assert refused >= special - END_IDS
    assert not refused & END_IDS
