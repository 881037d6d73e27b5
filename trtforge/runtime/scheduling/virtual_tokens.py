"""Virtual tokens: prompt tokens that are rows of the request's prompt table, from p-tuning or an image encoder.

As in TensorRT-LLM's PromptTuningEmbedding (tensorrt_llm/layers/embedding.py), ids from the vocabulary's size on are
rows of the table. A sequence contains names instead of these ids: digests of the rows' contents. KV block keys are
made of tokens, so they distinguish rows by content, whatever their ids are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from trtforge.runtime.scheduling.integers import Ints

VIRTUAL = 1 << 62
"""Smallest name of a row: larger than any token id of a vocabulary."""


@dataclass(frozen=True, eq=False)
class VirtualTokens:
    """The table rows that a prompt uses.

    `prompt`: its ids, with ids of rows replaced by the rows' names; `vectors`: each row as int64 (words,): numbers in
    the compute type, zero-padded to 8 bytes; `salt`: see `BlockTable`.
    """

    prompt: tuple[int, ...]
    vectors: Mapping[int, Ints]
    salt: bytes = b""

    @classmethod
    def of(cls, prompt: Sequence[int], vocab_size: int, table: Ints, extra_ids: Sequence[int] = ()) -> "VirtualTokens":
        """From a prompt whose ids from `vocab_size` on are rows of `table`, int64 (rows, words).

        `extra_ids`: one for each token, or none. Different ones give rows different names and text blocks different
        keys, as in TensorRT-LLM (`BlockKey`, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp).
        """
        extra = extra_ids or (0,) * len(prompt)
        names: list[int] = []
        vectors: dict[int, Ints] = {}
        known: dict[tuple[int, int], int] = {}
        for token, own in zip(prompt, extra, strict=True):
            if token < vocab_size:
                names.append(token)
                continue
            name = known.get((token, own))
            if name is None:
                vector = table[token - vocab_size]
                name = known[token, own] = _name(vector, own)
                vectors[name] = vector
            names.append(name)
        of_text = [own if token < vocab_size else 0 for token, own in zip(prompt, extra, strict=True)]
        salt = blake3(repr(of_text).encode()).digest(16) if any(of_text) else b""
        return cls(tuple(names), vectors, salt)


def _name(vector: Ints, extra_id: int) -> int:
    digest = blake3(vector.tobytes() + extra_id.to_bytes(8, "little")).digest(8)
    return VIRTUAL | (int.from_bytes(digest, "little") % VIRTUAL)


def embedded(tokens: Ints, tables: Iterable[VirtualTokens | None]) -> tuple[Ints, Ints]:
    """`Step.tokens` and `Step.embeddings` for tokens that contain names of rows of these tables."""
    places = np.flatnonzero(tokens >= VIRTUAL)
    numbers: dict[int, int] = {}
    for name in tokens[places].tolist():
        numbers.setdefault(name, len(numbers))
    vectors: dict[int, Ints] = {}
    for table in tables:
        if table is not None:
            vectors |= {name: table.vectors[name] for name in numbers.keys() & table.vectors.keys()}
    changed = tokens.copy()
    changed[places] = [VIRTUAL + numbers[name] for name in tokens[places].tolist()]
    return changed, np.stack([vectors[name] for name in numbers])


def before_virtual(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens before the first row name: only these may be drafted."""
    end = next((place for place, token in enumerate(tokens) if token >= VIRTUAL), len(tokens))
    return tuple(tokens[:end])
