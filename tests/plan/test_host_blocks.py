"""Host memory for KV blocks in a plan: at least a block, and a warning where this machine has not as much."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.test_serving_rules import messages, planned
from trtforge.machine.host import Host
from trtforge.plan.host_blocks import host_block_problems
from trtforge.plan.model import find_model

BLOCK = 32 * 2 * 8 * 128 * 2 * 32
"""Bytes of 32 tokens in Llama 3.1 8B's 32 layers: keys and values of 8 heads of 128 values of 2 bytes."""


@pytest.mark.parametrize("backend", ["tensorrt_llm", "llmapi", "torch"])
@pytest.mark.parametrize(
    ("options", "block"),
    [({}, BLOCK), ({"tp": 2}, BLOCK // 2), ({"pp": 2}, BLOCK // 2), ({"kv_cache": "fp8"}, BLOCK // 2)],
)
def test_less_than_a_block_of_a_rank_is_refused(backend: str, options: dict[str, Any], block: int) -> None:
    (found,) = messages(planned({"kv_cache_host_memory_bytes": block - 1}, backend, **options))
    assert (
        found
        == f"serving.kv_cache_host_memory_bytes is {block - 1:,}, less than the {block:,} bytes of a rank's KV block"
    )
    assert messages(planned({"kv_cache_host_memory_bytes": block}, backend, **options)) == []


def machine(tmp_path: Path, kilobytes: int) -> Host:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {kilobytes} kB\nMemAvailable: {kilobytes} kB\n")
    return Host(root=tmp_path)


def test_more_memory_than_this_machine_has_is_a_warning(tmp_path: Path) -> None:
    sizes, host = find_model("meta-llama/Llama-3.1-8B").facts.sizes, machine(tmp_path, 32 << 20)
    fits, exceeds = (planned({"kv_cache_host_memory_bytes": size}, "torch", tp=2) for size in ("16GiB", "17GiB"))
    assert list(host_block_problems(fits, sizes, host)) == []
    (problem,) = host_block_problems(exceeds, sizes, host)
    assert "36,507,222,016 bytes of host memory, this machine has 34,359,738,368" in problem.message
    assert not problem.refuses
    elsewhere = planned({"kv_cache_host_memory_bytes": "100TB"})
    assert list(host_block_problems(elsewhere, sizes, host)) == []  # TensorRT-LLM serves on a machine with the GPU


def test_on_the_cpu_weights_and_cache_take_the_same_memory(tmp_path: Path) -> None:
    sizes, host = find_model("meta-llama/Llama-3.1-8B").facts.sizes, machine(tmp_path, 32 << 20)
    found = planned({"kv_cache_host_memory_bytes": "16GiB"}, "torch", gpu=None)
    assert found.memory is not None
    taken = (16 << 30) + found.memory.over_all("weights") + found.memory.over_all("kv_pool")
    (problem,) = host_block_problems(found, sizes, host)
    assert f"the engine then needs {taken:,} bytes" in problem.message


def test_the_plan_shows_the_warning() -> None:
    found = planned({"kv_cache_host_memory_bytes": 2**62}, "torch")
    assert any("kv_cache_host_memory_bytes: the engine then needs" in warning for warning in found.warnings)
