"""Stop words that are compared as text, whatever the pieces in which it comes."""

from hypothesis import example, given
from hypothesis import strategies as st

from trtforge.core.stop_text import StopText

PIECES = st.lists(st.text(alphabet="abc\u00e9", max_size=4), max_size=12)
WORDS = st.lists(st.text(alphabet="abc\u00e9", min_size=1, max_size=4), min_size=1, max_size=3)


def whole_until(text: str, words: list[str]) -> str:
    """`text` up to the stop word that is complete first; of several that end there the longest."""
    _, at = min(((at + len(word), at) for word in words if (at := text.find(word)) >= 0), default=(0, len(text)))
    return text[:at]


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
        assert not stop.word
    else:
        assert text == whole_until("".join(pieces), words)
        assert stop.word in words
        assert "".join(pieces).startswith(text + stop.word)


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


@given(PIECES, WORDS | st.just([]))
@example(["ab", "ba"], ["abba", "bb"])
def test_an_included_stop_word_ends_the_text_and_nothing_is_held(pieces: list[str], words: list[str]) -> None:
    stop = StopText(words, included=True)
    text = "".join(pieces)
    released = ""
    for number, piece in enumerate(pieces):
        released += stop.push(piece)
        assert stop.found or released == "".join(pieces[: number + 1])
    end = min((at + len(word) for word in words if (at := text.find(word)) >= 0), default=None)
    assert (released, stop.flush()) == (text[:end], "")
    assert stop.found == (end is not None)
