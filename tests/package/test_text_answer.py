"""The answer to one text request: what its client gets as pieces of several sequences arrive."""

from typing import Any

import pytest
from tokenizers import Tokenizer

pytestmark = pytest.mark.usefixtures("library")


class Call:
    """What a client got: texts, and the error that ended the request."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.error: tuple[str, str] | None = None
        self.done = False

    def send(self, outputs: dict[str, Any], *, final: bool) -> None:
        self.texts.append(outputs["text_output"][0, 0].decode())
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
