from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.compile.trtllm import Trtllm

if TYPE_CHECKING:
    from tests.compile.test_llmapi import Models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> "Models":
    """Tiny models with their calibrations and checkpoints, each made once for a file of tests."""
    from tests.compile.test_llmapi import Models

    return Models(tmp_path_factory.mktemp("llmapi"))


@pytest.fixture
def trtllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trtllm:
    """TensorRT-LLM 1.2.1 beside two H100, as the processes of ranks find it."""
    found = Trtllm.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", found.environment["PYTHONPATH"])
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found
