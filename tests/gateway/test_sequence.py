"""Stop words are cut, whatever the pieces; scores follow the text."""

from tests.gateway.fake import score
from trtforge.gateway.request import Piece, TextRequest
from trtforge.gateway.sequence import AnswerSequence, Delta


def run(pieces: list[Piece], **options: object) -> list[Delta]:
    sequence = AnswerSequence(TextRequest("m", 10, **options), 3)  # type: ignore[arg-type]
    return [delta for piece in pieces for delta in sequence.take(piece)] + sequence.end()


def test_a_stop_word_in_one_piece_gives_its_whole_beginning() -> None:
    assert run([Piece(text="one STOP two", finish_reason="length")], stop=("STOP",)) == [
        Delta(3, "one ", "stop", stop_word="STOP")
    ]


def test_what_was_held_back_comes_with_the_end() -> None:
    deltas = run([Piece(text="one ST"), Piece(text="", finish_reason="length")], stop=("STOP",))
    assert deltas == [Delta(3, "one "), Delta(3, "ST", "length")]


def test_scores_of_a_stop_word_are_left_out() -> None:
    tokens = ["one", " ST", "OP", " two"]
    pieces = [Piece(text=token, logprobs=[score(token, 0)]) for token in tokens]
    deltas = run([*pieces, Piece(finish_reason="length")], stop=(" STOP",), logprobs=True)
    assert [(delta.text, [each["token"] for each in delta.logprobs]) for delta in deltas] == [
        ("one", ["one"]),
        ("", []),
    ]
    assert deltas[-1].finish_reason == "stop"


def test_scores_are_complete_without_a_stop_word() -> None:
    tokens = ["one", " ST", " two"]
    pieces = [Piece(text=token, logprobs=[score(token, 0)]) for token in tokens]
    deltas = run([*pieces, Piece(finish_reason="length")], stop=(" STOP",), logprobs=True)
    assert "".join(delta.text for delta in deltas) == "one ST two"
    assert [each["token"] for delta in deltas for each in delta.logprobs] == tokens


def test_a_server_that_gives_no_reason_is_judged_by_its_count() -> None:
    long = run([Piece(text="a", output_tokens=4), Piece(text="b", output_tokens=10)])
    short = run([Piece(text="a", output_tokens=4), Piece(text="b", output_tokens=5)])
    assert [delta.finish_reason for delta in (long[-1], short[-1])] == ["length", "stop"]


def test_pieces_after_the_end_are_ignored() -> None:
    assert run([Piece(text="a", finish_reason="stop"), Piece(text="b")]) == [Delta(3, "a", "stop")]
