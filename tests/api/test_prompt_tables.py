"""Prompt tables by the Python API, those of adapters that PEFT saved too: the answers are PEFT's."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO_MODEL
from tests.runtime.conftest import greedy
from tests.runtime.tables import save_tuning, with_tuning
from trtforge import Chat, Engine, SamplingParams, Tokens, Tuned, read_prompt_table
from trtforge.core.errors import ForgeError, RequestError

PROMPT, NEW = "Return the number of", 10
PARAMS = SamplingParams(max_tokens=NEW)


@pytest.fixture(scope="module")
def engine(tables: Path) -> Iterator[Engine]:
    with Engine.load(tables, kv_cache_tokens=2048, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def test_adapters_of_peft_answer_as_in_peft(engine: Engine, llama: Any, tmp_path: Path, tokenizer: Any) -> None:
    ids = tokenizer.encode(PROMPT).ids
    for encoder in (False, True):
        adapter = save_tuning(llama, tmp_path / str(encoder), 12, 3, encoder=encoder)
        rows = read_prompt_table(adapter)
        expected = greedy(with_tuning(llama, adapter), [ids], NEW)[0]
        first = engine.vocab_size
        ways = [
            Tuned(PROMPT, rows),
            Tuned(Tokens(ids), rows.numpy()),
            Tokens([*range(first, first + 12), *ids], rows.tolist()),
            Tokens([*range(first, first + 12), *ids], rows, extra_ids=[1] * 12 + [0] * len(ids)),
        ]
        made = engine.generate(ways, PARAMS)
        assert [each.tokens for each in made] == [expected] * 4
        assert len({each.text for each in made}) == 1
        assert made[0].usage.prompt_tokens == 12 + len(ids)
        assert "".join(piece.text for piece in engine.stream(ways[0], PARAMS)) == made[0].text
    assert engine.generate(PROMPT, PARAMS).tokens == greedy(llama, [ids], NEW)[0]


def test_chats_guides_and_several_sequences_may_have_tables(engine: Engine) -> None:
    rows = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    chat = Chat([{"role": "user", "content": "What is a list?"}])
    (tuned,) = engine.generate([Tuned(chat, rows)], PARAMS)
    assert tuned.usage.prompt_tokens == engine.generate(chat, PARAMS).usage.prompt_tokens + 5
    guided = engine.generate(Tuned("Is a list mutable? ", rows), SamplingParams(regex="yes|no", top_log_probs=2))
    assert guided.text in ("yes", "no")
    assert len(guided.log_probs) == len(guided.tokens)
    answer = engine.generate(Tuned(PROMPT, rows), SamplingParams(max_tokens=NEW, n=2))
    assert answer.completions[0].tokens == answer.completions[1].tokens


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((2, 3)), "prompt_embedding_table has rows of 3 numbers, the model's hidden size is 256"),
        (np.zeros(256), r"prompt_table is float32 \[256\]"),
        ("rows", "prompt_table is not a table of numbers"),
        ([[1.0], [1.0, 2.0]], "prompt_table is not a table of numbers"),
        (torch.zeros(2, 256).to_sparse(), "prompt_table is not a table of numbers"),
        (torch.zeros(2, 256, device="meta"), "prompt_table is not a table of numbers"),
        (np.zeros((2, 256), dtype=bool), r"prompt_table is bool \[2, 256\]"),
        (np.zeros((0, 256)), "prompt_embedding_table has 0 rows"),
        (np.full((2, 256), np.inf), "prompt_embedding_table has numbers that are not finite"),
    ],
)
def test_wrong_tables_are_refused(engine: Engine, table: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(Tuned(PROMPT, table), PARAMS)


def test_a_prompt_has_one_table(engine: Engine) -> None:
    rows = np.zeros((2, 256))
    for twice in (Tuned(Tuned(PROMPT, rows), rows), Tuned(Tokens([2048], rows), rows)):  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="a prompt has two prompt tables"):
            engine.generate(twice, PARAMS)
    with pytest.raises(RequestError, match="prompt_table_extra_ids has 1 ids, the prompt 2 tokens"):
        engine.generate(Tokens([2048, 5], rows, extra_ids=[3]), PARAMS)


@pytest.mark.parametrize("ids", [[1, 1], np.ones(2, dtype=int), 5])
def test_extra_ids_need_a_table(engine: Engine, ids: Any) -> None:
    for prompt in (Tokens([4, 5], extra_ids=ids), Tuned(Tokens([4, 5], extra_ids=ids), np.zeros((2, 256)))):
        with pytest.raises(RequestError, match="extra_ids is given without a prompt_table"):
            engine.generate(prompt, PARAMS)
    assert engine.generate(Tokens([4, 5], extra_ids=[]), PARAMS).usage.prompt_tokens == 2


@pytest.mark.parametrize("ids", [["a", 1], [math.nan, 1], [1.5, 1], None, 5])
def test_extra_ids_are_whole_numbers(engine: Engine, ids: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_table_extra_ids: .*(integer|iterable)"):
        engine.generate(Tokens([2048, 5], np.zeros((2, 256)), extra_ids=ids), PARAMS)


def test_directories_without_a_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"adapter_config.json does not exist"):
        read_prompt_table(tmp_path)
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ForgeError, match="peft_type is 'LORA', which has no prompt table"):
        read_prompt_table(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "P_TUNING"}')
    with pytest.raises(ForgeError, match="has no tensor prompt_embeddings"):
        read_prompt_table(tmp_path)
