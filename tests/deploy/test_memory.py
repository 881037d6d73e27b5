"""The host memory that pods request: what the settings of the repository ask for, in numbers."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.deploy.conftest import tensorrt_repository
from tests.deploy.objects import objects, pod_of
from tests.package.engines import FORGE, engine_config, llmapi_engine, tensorrt_engine, torch_engine, write_engine
from tests.package.test_features import built
from trtforge.core.manifest import open_artifact
from trtforge.deploy.workload import memory_request
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

GIB, MIB = 1 << 30, 1 << 20
HOST_BLOCKS = 64 * 10**9
PER_TOKEN = 2 * 4 * 2 * 32 * 4
"""Bytes of a token in the KV cache of `torch_engine`: keys and values, layers, KV heads, their size, float32."""
SEVERAL: dict[str, Any] = {"nodes": 2, "ssh_secret": "ranks-key", "image": "registry.example/llama:1"}


def packaged(engine: Path, out: Path, **serving: object) -> Path:
    return package(PackageConfig.parse({"serving": serving}, "test"), engine, DEMO_MODEL, out).path


def requested(repository: Path) -> int:
    """Bytes that the Deployment's container requests."""
    (container,) = pod_of(objects(repository)["Deployment"])["containers"]
    return mebibytes(container) * MIB


def mebibytes(container: dict[str, Any]) -> int:
    found = re.fullmatch(r"(\d+)Mi", container["resources"]["requests"]["memory"])
    assert found is not None
    return int(found[1])


def rounded_up(size: int) -> int:
    return -(-size // MIB) * MIB


def engine_bytes(repository: Path) -> int:
    files = open_artifact(repository, "repository").files
    return sum(record.bytes for name, record in files.items() if "/engine/" in name)


@pytest.mark.parametrize(
    ("serving", "more"),
    [
        ({}, 0),
        ({"kv_cache_tokens": 4_000_000}, 4_000_000 * PER_TOKEN),
        ({"kv_cache_tokens": 1000}, 992 * PER_TOKEN),  # full blocks of 16 tokens
        ({"kv_cache_host_memory_bytes": "64GB"}, HOST_BLOCKS),
        ({"kv_cache_tokens": 1600, "kv_cache_host_memory_bytes": "1GB"}, 1600 * PER_TOKEN + 10**9),
    ],
)
def test_an_embedded_engine_on_the_cpu_requests_its_kv_cache(
    tmp_path: Path, serving: dict[str, Any], more: int
) -> None:
    repository = packaged(torch_engine(tmp_path / "engine"), tmp_path / "repository", **serving)
    assert requested(repository) == rounded_up(4 * GIB + engine_bytes(repository) * 3 // 2 + more)


def test_a_draft_engine_on_the_cpu_has_a_kv_cache_of_its_own(tmp_path: Path) -> None:
    engine, draft = torch_engine(tmp_path / "engine"), torch_engine(tmp_path / "draft")
    repository = packaged(engine, tmp_path / "repository", draft_engine=str(draft), kv_cache_tokens=4_000_000)
    more = 2 * 4_000_000 * PER_TOKEN
    assert requested(repository) == rounded_up(4 * GIB + engine_bytes(repository) * 3 // 2 + more)


def test_an_embedded_engine_on_gpus_requests_host_memory_for_each_rank(tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "engine", engine_config(2, forge=FORGE | {"device": "cuda"}))
    plain = packaged(engine, tmp_path / "plain", kv_cache_tokens=4_000_000)
    assert requested(plain) == 8 * GIB
    offloaded = packaged(engine, tmp_path / "offloaded", kv_cache_host_memory_bytes="16GB")
    assert requested(offloaded) == rounded_up(8 * GIB + 2 * 16 * 10**9)


def test_ranks_request_host_memory_on_their_node(tmp_path: Path) -> None:
    plain = tensorrt_repository(tmp_path / "plain", 4, serving={"kv_cache_tokens": 4_000_000})
    assert requested(plain) == 8 * GIB
    serving = {"kv_cache_host_memory_bytes": "16GB"}
    repository = tensorrt_repository(tmp_path / "offloaded", 4, serving=serving)
    assert requested(repository) == rounded_up(8 * GIB + 4 * 16 * 10**9)
    group = objects(repository, **SEVERAL)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    for template in ("leaderTemplate", "workerTemplate"):
        (container,) = group[template]["spec"]["containers"]
        assert mebibytes(container) * MIB == rounded_up(8 * GIB + 2 * 16 * 10**9)
    twice = tensorrt_repository(tmp_path / "twice", 1, serving=serving | {"gpu_device_ids": "0;1"})
    assert requested(twice) == rounded_up(8 * GIB + 2 * 16 * 10**9), "two instances of a rank"


def test_adapters_request_their_cache_on_the_host(tmp_path: Path) -> None:
    features = built(lora={"max_rank": 8, "host_memory": "3GiB"})
    engine = tensorrt_engine(tmp_path / "engine", 2, features=features)
    assert requested(packaged(engine, tmp_path / "adapters")) == 8 * GIB + 2 * 3 * GIB
    both = packaged(engine, tmp_path / "both", kv_cache_host_memory_bytes="1GiB")
    assert requested(both) == 8 * GIB + 2 * 4 * GIB


def test_the_llm_api_requests_what_its_arguments_give(tmp_path: Path) -> None:
    repository = packaged(llmapi_engine(tmp_path / "engine"), tmp_path / "set", kv_cache_host_memory_bytes="2GiB")
    facts = read_facts(open_artifact(repository, "repository"))
    assert (facts.world_size, memory_request(facts, 0)) == (2, 8 * GIB + 2 * 2 * GIB)


def test_a_repository_without_these_settings_records_nothing_of_them() -> None:
    facts = RepositoryFacts(backend="torch", device="cpu", tensorrt_llm="1.2.1", world_size=1, engine_path="engine")
    assert not {"kv_bytes", "host_bytes"} & facts.recorded().keys()
    assert memory_request(facts, 1000) == 4 * GIB + 1500
