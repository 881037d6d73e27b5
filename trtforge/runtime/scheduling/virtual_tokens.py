"""Tokens of a prompt that are rows of a table which comes with its request: of p-tuning, or of an image's encoder.

As for TensorRT-LLM's PromptTuningEmbedding (tensorrt_llm/layers/embedding.py), ids from the vocabulary's size on are
rows of the table. A sequence has names in their place: digests of what the rows hold. So the keys of KV blocks, which
are made of tokens, tell rows apart by their content, whatever their ids are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from trtforge.runtime.scheduling.integers import Ints

VIRTUAL = 1 << 62
"""Names of rows are this and more: larger than any id of a vocabulary."""


@dataclass(frozen=True, eq=False)
class VirtualTokens:
    """The rows of its table that a prompt has.

    `prompt`: its ids, those of rows replaced by the rows' names; `vectors`: int64 (words,) of each, the numbers in the
    compute type and zeros up to 8 bytes; `salt`: see `BlockTable`.
    """

    prompt: tuple[int, ...]
    vectors: Mapping[int, Ints]
    salt: bytes = b""

    @classmethod
    def of(cls, prompt: Sequence[int], vocab_size: int, table: Ints, extra_ids: Sequence[int] = ()) -> "VirtualTokens":
        """Of a prompt whose ids from `vocab_size` on are rows of `table`, int64 (rows, words).

        `extra_ids`: of each token, or none. Rows with different ones get different names, and so do blocks of text:
        TensorRT-LLM has them in the keys of blocks (`BlockKey`, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp).
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
    """The fields `tokens` and `embeddings` of a step (`Step`) whose tokens hold names of the rows of these tables."""
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
    """The tokens before the first that is a row's name: what may be proposed as an output."""
    end = next((place for place, token in enumerate(tokens) if token >= VIRTUAL), len(tokens))
    return tuple(tokens[:end])
