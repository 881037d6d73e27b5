"""The longest prompt that an engine took is the one that is migrated."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.migrate.test_migration import demo_engine, foreign_engine, migrated, reason, repository
from tests.package.engines import write_engine
from trtforge.formats.llmapi import read_llm_args
from trtforge.pipeline.migration import MigrateOptions, run_migration


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5119),
        ({"max_input_len": 5120}, 5119),
        ({"max_num_tokens": 2048}, 2048),
        ({"max_seq_len": None}, None),
        ({"plugin_config__context_fmha": False}, 4096),
        ({"plugin_config__remove_input_padding": False}, 4096),
    ],
)
def test_prompts_are_as_long_as_the_engine_took_them(
    tmp_path: Path, changes: dict[str, Any], expected: int | None
) -> None:
    """TensorRT-LLM ignores max_input_len for packed input with fused attention."""
    found = migrated(foreign_engine(tmp_path / "engine", **changes))
    assert found.args.max_input_len == expected
    assert found.values.get("max_input_len") == expected
    carried = [entry.argument for entry in found.carried if entry.to == "max_input_len"]
    if expected == 4096:
        assert carried == [4096]
        assert "build_config.max_input_len" not in {entry.key for entry in found.attention}
    else:
        assert carried == []
        said = f"max_input_len is {expected} now" if expected else "max_input_len is the model's now"
        assert said in reason(found.attention, "build_config.max_input_len")


def test_prompts_that_are_cut_may_be_longer_than_a_step(tmp_path: Path) -> None:
    engine = foreign_engine(tmp_path / "engine", max_num_tokens=2048)
    source = repository(tmp_path / "r", {"enable_chunked_context": "true", "gpt_model_path": str(engine)})
    assert migrated(source).args.max_input_len == 5119


def test_the_embedded_engines_longest_prompt_stays(tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"forge": {"features": {"kv_reuse": True}}}))
    assert migrated(source).args.max_input_len == 4096


@pytest.mark.parametrize("ignored", [1024, 512])
def test_an_ignored_longest_prompt_neither_refuses_the_engine_nor_stays(tmp_path: Path, ignored: int) -> None:
    values = demo_engine()
    values["build_config"] |= {"max_input_len": ignored, "max_seq_len": 1024}
    values["build_config"]["plugin_config"] |= {"remove_input_padding": True, "context_fmha": True}
    source = write_engine(tmp_path / "engine", values)
    _, made = run_migration(MigrateOptions(source, "1.3.0", checkpoint=DEMO_MODEL), tmp_path / "out")
    assert read_llm_args(made.path).max_input_len == 1023
