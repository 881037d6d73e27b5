"""Repositories to deploy: of the embedded engine, of TensorRT-LLM with 1 and 4 ranks, of the LLM API."""

from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import H100, tensorrt_engine, torch_engine
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package


@pytest.fixture(scope="package")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("embedded")
    return package(PackageConfig(), torch_engine(place / "engine"), DEMO_MODEL, place / "repository").path


@pytest.fixture(scope="package")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tensorrt_repository(tmp_path_factory.mktemp("llama"), 1)


@pytest.fixture(scope="package")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tensorrt_repository(tmp_path_factory.mktemp("llama-tp4"), 4)


def tensorrt_repository(place: Path, tp: int, **config: object) -> Path:
    engine = tensorrt_engine(place / "engine", tp, target=H100)
    return package(PackageConfig.parse(config, "test"), engine, DEMO_MODEL, place / "repository").path
