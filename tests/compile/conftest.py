from pathlib import Path

import pytest

from tests.compile.trtllm import Trtllm


@pytest.fixture
def trtllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trtllm:
    """TensorRT-LLM 1.2.1 beside two H100, as the processes of ranks find it."""
    found = Trtllm.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", found.environment["PYTHONPATH"])
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found
