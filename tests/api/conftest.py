"""Engines of the demo model."""

from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.features import FeaturesConfig
from trtforge.core.recipe import EngineConfig


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build directory, as far as the API needs one."""
    place = tmp_path_factory.mktemp("api") / "build"
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, place / "checkpoint").path
    compile_engine(EngineConfig(backend="torch"), checkpoint, place / "engine")
    return place


@pytest.fixture(scope="session")
def beams(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for beams and logits, as docs/python.md compiles it."""
    features = FeaturesConfig(context_logits=True, generation_logits=True)
    directory = tmp_path_factory.mktemp("beams") / "engine"
    compile_engine(EngineConfig(backend="torch", max_beam_width=4, features=features), build / "checkpoint", directory)
    return directory


@pytest.fixture(scope="session")
def tables(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for prompt tables, as docs/python.md compiles it."""
    features = FeaturesConfig(max_prompt_embedding_table_size=1280)
    directory = tmp_path_factory.mktemp("tables") / "engine"
    compile_engine(EngineConfig(backend="torch", features=features), build / "checkpoint", directory)
    return directory
