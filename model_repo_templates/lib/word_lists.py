"""Words to the tensors that TensorRT-LLM takes: stop and bad word lists, the embedding bias."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MOST_WORDS = 256
"""Stop words, bad words or biased words that one request may have."""
LONGEST_WORDS = 16384
"""Bytes of their texts together, and tokens together: an engine compares them after every token."""


def word_list(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """int32 [1, 2, n]: row 0 the ids of all words, row 1 where each word ends, padded with -1.

    Layout: `to_word_list_format` in tensorrt_llm/runtime/generation.py.
    """
    ids = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32)
    lists = np.full((1, 2, len(ids)), -1, dtype=np.int32)
    lists[0, 0] = ids
    lists[0, 1, : len(ends)] = ends
    return lists


def words_of(lists: NDArray[np.int32]) -> list[tuple[int, ...]]:
    """The words of one request's [2, n] list. Raises ValueError for offsets that do not ascend or exceed n."""
    ids, ends = lists.tolist()
    words, start = [], 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(ids):
            raise ValueError(f"offsets {ends} are not ascending numbers up to {len(ids)} tokens")
        words.append(tuple(ids[start:end]))
        start = end
    return words


def encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Each word's ids, tokenized alone; words without ids are left out."""
    encoded = (tokenizer.encode(word, add_special_tokens=False).ids for word in words)
    return [ids for ids in encoded if ids]


def embedding_bias(
    tokenizer: Tokenizer, words: Sequence[str], weights: Sequence[float], vocab_size: int
) -> NDArray[np.float32]:
    """float32 [1, vocab_size]: each token of each word has that word's weight added to its logit."""
    bias = np.zeros((1, vocab_size), dtype=np.float32)
    for word, weight in zip(words, weights, strict=True):
        for token in tokenizer.encode(word, add_special_tokens=False).ids:
            bias[0, token] += weight
    return bias
