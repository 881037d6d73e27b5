"""Sliding windows of TensorRT engines: written into config.json after the build, for the executor that loads it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine, llama
from tests.compile.engines import build
from tests.compile.trtllm import MACHINE, Trtllm, write_checkpoint
from trtforge.compile.build_config import BuildPlan, build_config
from trtforge.formats.foreign import engine_manifest
from trtforge.formats.releases import release
from trtforge.package.engine_facts import read_engine
from trtforge.plan.limits import derive_limits

EVERY_SECOND = {"sliding_window": 1024, "sliding_window_layers": list(range(0, 32, 2))}


def plan(settings: dict[str, Any] | None = None, **changes: Any) -> BuildPlan:
    model = llama(**changes)
    config = engine(max_batch_size=8, **({"max_seq_len": 4096} | (settings or {})))
    return build_config(model, config, derive_limits(model, config, 32), release("1.2.1"))


@pytest.mark.parametrize("version", ["0.17.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 1024}, {"max_attention_window": [1024]}),
        (EVERY_SECOND, {"max_attention_window": [1024, 4096] * 16}),
        ({"sliding_window": 4096}, None),
        ({}, None),
    ],
)
def test_an_engine_tells_the_executor_its_windows(
    changes: dict[str, Any], expected: dict[str, Any] | None, version: str, tmp_path: Path, trtllm: Trtllm
) -> None:
    Trtllm.install(trtllm.site, version)
    write_checkpoint(tmp_path / "checkpoint", changes=changes, tp=2)
    config = engine(backend="tensorrt_llm", max_batch_size=8, max_seq_len=4096, target={"tensorrt_llm": version})
    machine = replace(MACHINE, tensorrt_llm=version)
    built = build(tmp_path, config=config, machine=machine).path
    written = json.loads((built / "config.json").read_text())
    assert written["pretrained_config"].get("runtime_defaults") == expected
    assert written["build_config"]["max_seq_len"] == 4096
    packaged = read_engine(built, engine_manifest(built)).windows
    assert list(packaged) == (expected or {}).get("max_attention_window", [])


def test_full_layers_have_room_for_draft_tokens() -> None:
    found = plan({"features": {"draft": {"tokens": 5}}}, **EVERY_SECOND)
    assert found.windows[1] == 4096 + found.limits.spare_tokens > 4096


def test_the_plan_says_that_an_engine_of_trtllm_build_lacks_them() -> None:
    assert any("runtime_defaults" in note for note in plan(sliding_window=1024).notes)
    assert not any("runtime_defaults" in note for note in plan().notes)
