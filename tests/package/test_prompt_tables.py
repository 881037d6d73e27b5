"""Prompt tables as tensors of the models, and their way to the engine's process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import FORGE, engine_config, write_engine
from tests.package.test_stage import model_config
from tests.package.test_stage import parameters as read_parameters
from trtforge.core.errors import ForgeError
from trtforge.engine_process.frames import BadFrame
from trtforge.engine_process.messages import Submission
from trtforge.engine_process.requests import GenerationRequest, PromptTable
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

pytestmark = pytest.mark.usefixtures("library")

ROWS = np.arange(2 * 3 * 4, dtype=np.float16).reshape(2, 3, 4)
"""Tables of two prompts, of three rows with four numbers."""


def inputs(**changes: Any) -> dict[str, np.ndarray]:
    """Two prompts, the second one shorter."""
    values = {
        "input_ids": np.array([[100, 101, 5, 102], [7, 102, 0, 0]], dtype=np.int32),
        "input_lengths": np.array([[4], [2]], dtype=np.int32),
        "request_output_len": np.array([[4], [4]], dtype=np.int32),
        "prompt_embedding_table": ROWS,
        "prompt_vocab_size": np.array([[3], [3]], dtype=np.int32),
        "prompt_table_extra_ids": np.array([[9, 9, 0, 9], [0, 2**64 - 1, 0, 0]], dtype=np.uint64),
    }
    return {name: value for name, value in (values | changes).items() if value is not None}


def asked(**changes: Any) -> list[GenerationRequest]:
    from engine_requests import RequestLimits, requested_sequences  # type: ignore[import-not-found]

    limits = RequestLimits(100, 8, (2,), takes_prompt_tables=True)
    return [each.request for each in requested_sequences(inputs(**changes), limits)]


def test_each_prompt_has_its_table_and_extra_ids() -> None:
    first, second = asked()
    assert (first.prompt, second.prompt) == ((100, 101, 5, 102), (7, 102))
    assert first.prompt_table == PromptTable(3, 4, "float16", ROWS[0].tobytes(), (9, 9, 0, 9))
    assert second.prompt_table == PromptTable(3, 4, "float16", ROWS[1].tobytes(), (0, 2**64 - 1))
    (third, _) = asked(
        prompt_embedding_table=ROWS.astype(np.float32), prompt_vocab_size=None, prompt_table_extra_ids=None
    )
    assert third.prompt_table == PromptTable(3, 4, "float32", ROWS[0].astype(np.float32).tobytes())
    plain = dict.fromkeys(("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids"))
    assert asked(**plain, input_ids=np.array([[1, 2, 3, 4], [5, 6, 0, 0]]))[0].prompt_table is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_vocab_size": np.array([[4], [4]])}, "prompt_embedding_table has 3 rows, prompt_vocab_size is 4"),
        (
            {"prompt_embedding_table": None, "prompt_table_extra_ids": None},
            "prompt_vocab_size came without prompt_embedding_table",
        ),
        (
            {"prompt_embedding_table": None, "prompt_vocab_size": None},
            "prompt_table_extra_ids came without prompt_embedding_table",
        ),
        (
            {"prompt_embedding_table": ROWS[0]},
            "prompt_embedding_table is float16 [3, 4]; it must be a tensor [prompts,",
        ),
        ({"prompt_embedding_table": ROWS.astype(np.int32)}, "prompt_embedding_table is int32 [2, 3, 4]; it must be"),
        (
            {"prompt_embedding_table": ROWS.astype(np.float64)},
            "prompt_embedding_table is float64 [2, 3, 4]; it must be",
        ),
        (
            {"prompt_table_extra_ids": np.zeros((2, 3), dtype=np.uint64)},
            "prompt_table_extra_ids is uint64 [2, 3]; it must be an id for each token of the prompt",
        ),
        (
            {"input_ids": np.array([[103, 0, 0, 0], [100, 0, 0, 0]], dtype=np.int32)},
            "input_ids holds the id 103; ids are from 0 to 102",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    from responder import RequestFailed  # type: ignore[import-not-found]

    with pytest.raises(RequestFailed) as caught:
        asked(**changes)
    assert message in str(caught.value)


def test_engines_without_tables_refuse_them() -> None:
    from engine_requests import RequestLimits, requested_sequences
    from responder import RequestFailed

    with pytest.raises(RequestFailed, match="prompt_embedding_table is not supported by this engine"):
        requested_sequences(inputs(), RequestLimits(100, 8, (2,)))


def test_tables_travel_to_the_engines_process_once() -> None:
    table = PromptTable(2, 3, "bfloat16", bytes(range(12)), (7, 2**64 - 1))
    first = GenerationRequest("3", (100, 101), 4, prompt_table=table)
    second = replace(first, request_id="4", prompt=(1, 2), prompt_table=None)
    copy = replace(first, request_id="5", copy_of="0", sampling=replace(first.sampling, seed=1))
    sent = Submission((first, second, copy), None, 3)
    assert sent.size == 3 * 8 + 2 * 12
    frame = sent.encode()
    assert len(frame.payload) == 2 * 8 + 12
    decoded = Submission.decode(frame).requests
    assert [each.prompt_table for each in decoded] == [table, None, table]
    assert [each.prompt for each in decoded] == [(100, 101), (1, 2), (100, 101)]
    frame.header["requests"][0]["table"]["bytes"] = 99
    with pytest.raises(BadFrame, match="the payload is too short"):
        Submission.decode(frame)


def prepared(rows: int, **given: Any) -> dict[str, np.ndarray]:
    from model_config import ModelConfig  # type: ignore[import-not-found]
    from preprocessor import Preprocessor  # type: ignore[import-not-found]

    values = {"tokenizer_dir": str(DEMO_MODEL), "max_input_len": "64", "vocab_size": "2048"}
    config = json.dumps({"parameters": {name: {"string_value": value} for name, value in values.items()}})
    repository = {"model_repository": "", "model_version": "1", "model_name": "preprocessing"}
    made: dict[str, np.ndarray] = Preprocessor(ModelConfig({"model_config": config, **repository})).prepare(
        {"REQUEST_OUTPUT_LEN": np.array([[4]], dtype=np.int32), **given}, rows
    )
    return made


def test_text_models_put_rows_before_a_text_and_leave_ids_as_they_are() -> None:
    text = {"QUERY": np.array([[b"a file"]], dtype=object)}
    extra = {"PROMPT_TABLE_EXTRA_ID": np.array([[2**64 - 1]], dtype=np.uint64)}
    plain = prepared(0, **text)["INPUT_ID"][0].tolist()
    made = prepared(3, **text, **extra)
    assert made["INPUT_ID"].tolist() == [[2048, 2049, 2050, *plain]]
    assert made["REQUEST_INPUT_LEN"].tolist() == [[3 + len(plain)]]
    assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[2**64 - 1] * 3 + [0] * len(plain)]
    assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].dtype == np.uint64
    ids = {"input_ids": np.array([[5, 2049, 6]], dtype=np.int32)}
    made = prepared(3, **ids, **extra)
    assert made["INPUT_ID"].tolist() == [[5, 2049, 6]]
    assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, 2**64 - 1, 0]]


def test_models_know_whether_the_engine_takes_tables(tmp_path: Path) -> None:
    found = []
    for name, size in (("with", 640), ("without", 0)):
        config = engine_config(forge=FORGE | {"features": {"max_prompt_embedding_table_size": size}})
        config["build_config"] |= {"max_prompt_embedding_table_size": size}
        repository = package(PackageConfig(), write_engine(tmp_path / name, config), DEMO_MODEL, tmp_path / f"{name}r")
        for role in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
            found.append(read_parameters(model_config(repository.path, role)).get("takes_prompt_tables"))
    assert found == ["true"] * 3 + [None] * 3


def test_an_engine_that_was_built_for_fewer_rows_is_refused(tmp_path: Path) -> None:
    config = engine_config(forge=FORGE | {"features": {"max_prompt_embedding_table_size": 640}})
    config["build_config"] |= {"max_prompt_embedding_table_size": 320}
    engine = write_engine(tmp_path / "engine", config)
    with pytest.raises(ForgeError, match="the engine was not built for max_prompt_embedding_table_size"):
        package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out")
