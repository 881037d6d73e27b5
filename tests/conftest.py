"""What many tests start from: small checkpoints that anyone can make again."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.golden.make_hf import write_case
from trtforge.core.assets import asset_directory
from trtforge.models.elementwise import choose_kernels

# These machines are shared: how long an example, or drawing one, takes says nothing.
settings.register_profile("trtforge", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trtforge")

choose_kernels()  # what tests compare with needs accurate cosines too

# Triton decides when it is imported whether kernels are compiled for a GPU or interpreted on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests that a shell starts in the background ignore interruptions, those under `nohup` closed terminals, and so does
# all that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

DEMO_MODEL = Path(__file__).parent.parent / "recipes" / "demo-model"
SMALL_TOKENIZER = (
    '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
)
"""The shortest tokenizer.json that can be loaded."""

LONGEST = (
    "tests/test_end_to_end.py",
    "tests/serve/test_watching.py",
    "tests/calibrate/test_memory.py",
    "tests/serve/test_stopping.py",
    "tests/cli/test_interruption.py",
    "tests/serve/test_chat.py",
    "tests/assault/test_assault.py",
    "tests/serve/test_gateway_process.py",
    "tests/cli/test_run.py",
    "tests/cli/test_compile.py",
    "tests/runtime/test_ranks.py",
    "tests/serve/test_supervision.py",
    "tests/serve/test_openai.py",
    "tests/assault/test_fuzz_build.py",
    "tests/test_layering.py",
    "tests/cli/test_real_terminal.py",
    "tests/pipeline/test_sensitivity.py",
    "tests/runtime/test_families.py",
    "tests/cli/test_chat.py",
)
"""Files that take a minute and more where several processes run the tests, the longest first."""

MakeHf = Callable[..., Path]
Edit = Callable[[Path, Callable[[dict[str, torch.Tensor]], object]], None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several processes, none shall begin a long file when the others are done: they come first."""
    if hasattr(config, "workerinput"):  # of pytest-xdist
        place = {path: number for number, path in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the demo model."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def library() -> Iterator[None]:
    """The modules of the Triton models can be imported, as their processes import them, and are forgotten after it.

    No other module is: torch registers its operators at an import, and cannot twice.
    """
    path = asset_directory("model_repo_templates") / "lib"
    own = {"triton_python_backend_utils", *(file.stem for file in path.glob("*.py"))}
    sys.modules["triton_python_backend_utils"] = ModuleType("triton_python_backend_utils")
    with patch.object(sys, "path", [str(path), *sys.path]):
        yield
    for name in own & sys.modules.keys():
        del sys.modules[name]


@pytest.fixture
def golden_hf(tmp_path: Path) -> Path:
    """The `llama_gqa` checkpoint: 4 layers, hidden 128, 8 heads, 2 KV heads, bfloat16."""
    return write_case("llama_gqa", tmp_path / "hf")


@pytest.fixture
def make_hf(tmp_path: Path) -> MakeHf:
    """Writes a random Llama in HF layout by transformers itself: `make_hf(name, shards=1, **config)`."""

    def make(name: str = "hf", *, dtype: torch.dtype = torch.float32, shard_size: str = "5GB", **config: Any) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        defaults: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 97,
            "max_position_embeddings": 128,
        }
        model = LlamaForCausalLM(LlamaConfig(**(defaults | config))).to(dtype)
        model.save_pretrained(tmp_path / name, max_shard_size=shard_size)
        return tmp_path / name

    return make


@pytest.fixture
def edit_tensors() -> Edit:
    """Rewrites a checkpoint's single weight file after a change to its tensors."""

    def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        from safetensors.torch import load_file

        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Changes keys of a checkpoint's config.json."""

    def edit(directory: Path, **changes: Any) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit
