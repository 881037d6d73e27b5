"""Lists of words in TensorRT-LLM's layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("library")


@given(st.lists(st.lists(st.integers(0, 50000), min_size=1, max_size=5), min_size=1, max_size=6))
def test_word_lists_are_read_as_they_were_written(words: list[list[int]]) -> None:
    from word_lists import word_list, words_of  # type: ignore[import-not-found]

    lists = word_list(words)
    assert lists.shape == (1, 2, sum(map(len, words)))
    assert words_of(lists[0]) == [tuple(word) for word in words]


def test_word_list_layout_is_that_of_tensorrt_llm() -> None:
    from word_lists import word_list

    assert word_list([[7, 8], [9]]).tolist() == [[[7, 8, 9], [2, 3, -1]]]


@pytest.mark.parametrize("ends", [[3, 2, -1], [1, 9, -1], [0, 1, 2]])
def test_word_list_with_wrong_offsets_is_an_error(ends: list[int]) -> None:
    import numpy as np
    from word_lists import words_of

    with pytest.raises(ValueError, match="are not ascending"):
        words_of(np.array([[7, 8, 9], ends]))
