"""The answer to one text request: what its client gets as pieces of several sequences arrive."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.core.test_detokenizer import TOKENIZERS

pytestmark = pytest.mark.usefixtures("library")


class Call:
    """What a client got: texts, and the error that ended the request."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.outputs: dict[str, Any] = {}
        self.error: tuple[str, str] | None = None
        self.done = False

    def send(self, outputs: dict[str, Any], *, final: bool) -> None:
        self.texts.append(outputs["text_output"][0, 0].decode())
        self.outputs = outputs
        self.done = final

    def finish(self) -> None:
        self.done = True

    def fail(self, message: str, code: str) -> None:
        self.error, self.done = (message, code), True


def test_a_failure_ends_a_request_of_which_a_sequence_has_ended(tokenizer: Tokenizer) -> None:
    """Errors of the whole request come as the first sequence's, which may have its last piece."""
    from answer_report import AnswerReport  # type: ignore[import-not-found]
    from sequence_texts import SequenceTexts  # type: ignore[import-not-found]
    from text_answer import TextAnswer  # type: ignore[import-not-found]
    from text_engine import Piece  # type: ignore[import-not-found]
    from text_options import TextOptions  # type: ignore[import-not-found]

    call, stopped = Call(), list[bool]()
    report = AnswerReport(TextOptions.of({}), [], 9, None)
    answer = TextAnswer(
        call,
        SequenceTexts(tokenizer, [], [], 2),
        {},
        report,
        streaming=True,
        prompt="",
        on_stopped=lambda: stopped.append(True),
    )
    answer.take([Piece(0, [tokenizer.encode("a").ids], True)])
    assert (call.texts, call.done) == (["a"], False)
    failed = Piece(0, [], True, failure=("the request's timeout has passed", "DEADLINE_EXCEEDED"))
    answer.take([failed, failed])
    assert (call.error, call.done, stopped) == (failed.failure, True, [True])


@pytest.mark.parametrize(
    ("thought", "wanted", "told"), [("<think>", True, True), ("", True, True), (None, True, False), ("", False, False)]
)
def test_reasoning_that_the_prompt_began_is_told_once_for_each_sequence(
    tokenizer: Tokenizer, thought: str | None, wanted: bool, told: bool
) -> None:
    from answer_report import AnswerReport  # type: ignore[import-not-found]
    from text_engine import Piece  # type: ignore[import-not-found]
    from text_options import TextOptions  # type: ignore[import-not-found]

    options = TextOptions.of({"return_prompt_thought": np.array([[wanted]])})
    report = AnswerReport(options, [], 9, None, prompt_thought=thought)
    for sequence in range(2):
        found = []
        for finished in (False, True):
            report.take(Piece(sequence, [tokenizer.encode("a").ids], finished), stopped=False)
            found.append(report.tensors(sequence))
        assert [list(each) for each in found] == [["prompt_thought"] if told else [], []]
        assert not told or found[0]["prompt_thought"].tolist() == [[(thought or "").encode()]]


def test_tokens_after_a_stop_word_do_not_count_however_they_come(tokenizer: Tokenizer) -> None:
    """The engine goes on until it learns of a stop word in the text, and may send several tokens together."""
    from answer_report import AnswerReport
    from sequence_texts import SequenceTexts
    from text_answer import TextAnswer
    from text_engine import Piece
    from text_options import TextOptions
    from token_texts import ScoredTexts  # type: ignore[import-not-found]

    ids = tokenizer.encode("one, two, three", add_special_tokens=False).ids
    counted = len(tokenizer.encode("one,", add_special_tokens=False).ids)
    values = np.arange(len(ids), dtype=np.float32)
    asked = {name: np.array([[True]]) for name in ("return_num_output_tokens", "return_logprobs")}
    for size in (1, 3, len(ids)):
        call = Call()
        report = AnswerReport(TextOptions.of(asked), [], 99, ScoredTexts(tokenizer))
        outputs = {name: name for name in ("output_log_probs", "cum_log_probs")}
        texts = SequenceTexts(tokenizer, [], [","], 1)
        answer = TextAnswer(call, texts, outputs, report, streaming=False, prompt="", on_stopped=lambda: None)
        for start in range(0, len(ids), size):
            own = values[start : start + size]
            total = values[: start + size].sum(keepdims=True)
            passed = {"output_log_probs": own.reshape(1, 1, -1), "cum_log_probs": total.reshape(1, 1)}
            answer.take([Piece(0, [ids[start : start + size]], False, passed, log_probs=own.tolist())])
        assert (call.texts, call.done) == (["one,"], True)
        assert call.outputs["num_output_tokens"].tolist() == [[counted]]
        assert call.outputs["output_log_probs"].tolist() == [[values[:counted].tolist()]]
        assert call.outputs["cum_log_probs"].tolist() == [[values[:counted].sum()]]
        assert [each["id"] for each in json.loads(call.outputs["logprobs"][0, 0])] == ids[:counted]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_scored_tokens_make_the_text(name: str) -> None:
    """Without special tokens, and without the space that some tokenizers leave out at a text's beginning."""
    from token_texts import ScoredTexts

    tokenizer, texts = TOKENIZERS[name], ScoredTexts(TOKENIZERS[name])
    special = [token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    ids = tokenizer.encode("Hello world, 日本 🙂", add_special_tokens=False).ids
    for answer in (ids, [*special, *ids[:3], *special, *ids[3:]]):
        scored = texts.scored(answer, [0.0] * len(answer), (), begins=True)
        assert b"".join(bytes(each["bytes"]) for each in scored).decode() == tokenizer.decode(answer)
        shown = texts.prompt(answer, [0.0] * len(answer), ())
        assert b"".join(bytes(each["bytes"]) for each in shown).decode() == tokenizer.decode(
            answer, skip_special_tokens=False
        )
    assert texts.begin(special)
    assert not texts.begin([*special, *ids])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_goes_on_with_the_space_that_the_tokenizer_puts_there(name: str) -> None:
    from sequence_texts import SequenceTexts

    tokenizer = TOKENIZERS[name]
    before, whole = "Hello world, " * 30 + "Hello", "Hello world, " * 30 + "Hello world"
    prompt, ids = tokenizer.encode(before).ids, tokenizer.encode(whole).ids
    texts = SequenceTexts(tokenizer, prompt, [" world"], 1)
    assert texts.push(0, [ids[len(prompt) :]]) == [(" world", len(ids) - len(prompt))]
    assert texts.stopped(0)
