"""Names of rows of prompt tables, and steps with these rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.scheduling.step_codec import decode, encode
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL, VirtualTokens


@given(st.data())
def test_steps_name_each_row_once_and_encode_to_the_same(data: st.DataObject) -> None:
    """Chunks of prompts with rows: every packed token gets the vector of its row."""
    tables = [np.arange(12, dtype=np.int64).reshape(4, 3) * scale for scale in (1, 7)]
    rows, wanted = [], []
    for number in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(90, 103), min_size=2, max_size=9))
        table = tables[data.draw(st.integers(0, 1))]
        virtual = VirtualTokens.of(prompt, 100, table) if data.draw(st.booleans()) or max(prompt) >= 100 else None
        sequence = Sequence.of(GenerationRequest(str(number), tuple(prompt), 3), 0, 99, lambda output: None, virtual)
        start = data.draw(st.integers(0, len(prompt) - 1))
        count = data.draw(st.integers(1, len(prompt) - start))
        sequence.table.blocks = [0] * 4
        rows.append(Row(sequence, start, count, samples=start + count == len(prompt)))
        chunk = prompt[start : start + count]
        wanted += [table[token - 100].tolist() if token >= 100 else token for token in chunk]
    step = Step.of_rows(rows)
    again = decode(np.append(encode(step), 5))
    for made in (step, again):
        found = [
            made.embeddings[token - VIRTUAL].tolist() if token >= VIRTUAL else token for token in made.tokens.tolist()
        ]
        assert found == wanted
        assert len({tuple(each) for each in made.embeddings.tolist()}) == len(made.embeddings)
    assert (len(step.embeddings) > 0) == any(isinstance(each, list) for each in wanted)


@given(st.lists(st.integers(95, 104), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_names_are_equal_where_rows_and_extra_ids_are(prompt: list[int], extra: list[int]) -> None:
    table = np.array([[1], [2], [1], [3], [2]], dtype=np.int64)
    given_ids = tuple(own if token >= 100 else 0 for token, own in zip(prompt, extra, strict=False))
    made = VirtualTokens.of(prompt, 100, table, given_ids)
    told = [
        token if token < 100 else (int(table[token - 100, 0]), own)
        for token, own in zip(prompt, given_ids, strict=True)
    ]
    for one, own in zip(told, made.prompt, strict=True):
        assert (own >= VIRTUAL) is isinstance(one, tuple)
        for other, theirs in zip(told, made.prompt, strict=True):
            assert (one == other) is (own == theirs)
    assert made.salt == b""
    of_text = VirtualTokens.of(prompt, 100, table, [1] * len(prompt)).salt
    assert bool(of_text) is (min(prompt) < 100)
