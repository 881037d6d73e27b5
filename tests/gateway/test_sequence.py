"""Stop words are cut, whatever the pieces; scores follow the text."""

from hypothesis import example, given
from hypothesis import strategies as st

from tests.gateway.fake import score
from trtforge.core.stop_text import StopText
from trtforge.gateway.request import Piece, TextRequest
from trtforge.gateway.sequence import AnswerSequence, Delta

PIECES = st.lists(st.text(alphabet="abc\u00e9", max_size=4), max_size=12)
WORDS = st.lists(st.text(alphabet="abc\u00e9", min_size=1, max_size=4), min_size=1, max_size=3)


def whole_until(text: str, words: list[str]) -> str:
    """`text` up to the stop word that is complete first; of several that end there the longest."""
    _, at = min(((at + len(word), at) for word in words if (at := text.find(word)) >= 0), default=(0, len(text)))
    return text[:at]


def run(pieces: list[Piece], **options: object) -> list[Delta]:
    sequence = AnswerSequence(TextRequest("m", 10, **options), 3)  # type: ignore[arg-type]
    found = [*(sequence.take(piece) for piece in pieces), sequence.end()]
    return [delta for delta in found if delta is not None]


@given(PIECES, WORDS)
@example(["abca"], ["abca", "bc"])
def test_text_ends_at_the_stop_word_that_is_complete_first(pieces: list[str], words: list[str]) -> None:
    stop = StopText(words)
    released = [stop.push(piece) for piece in pieces]
    text = "".join(released)
    if not stop.found:
        text += stop.flush()
        assert text == "".join(pieces)
        assert all(word not in text for word in words)
    else:
        assert text == whole_until("".join(pieces), words)


@given(PIECES, WORDS)
def test_nothing_is_held_that_cannot_begin_a_stop_word(pieces: list[str], words: list[str]) -> None:
    stop = StopText(words)
    seen, released = "", ""
    for piece in pieces:
        seen += piece
        released += stop.push(piece)
        if stop.found:
            return
        held = seen[len(released) :]
        assert not held or any(word.startswith(held) for word in words)


def test_a_stop_word_in_one_piece_gives_its_whole_beginning() -> None:
    assert run([Piece(text="one STOP two", finish_reason="length")], stop=("STOP",)) == [Delta(3, "one ", "stop")]


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
