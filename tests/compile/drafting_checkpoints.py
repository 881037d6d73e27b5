"""Small checkpoints with Medusa heads or an EAGLE network, and engines of them."""

from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from tests.compile.checkpoints import engine
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.features import Drafting
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import Generation, generate_with


def converted(model: LlamaForCausalLM, what: Drafting, base: Path, **options: Any) -> Path:
    """A checkpoint of `model` with heads or a network, in float32; the model is in `base` / "hf"."""
    model.save_pretrained(base / "hf")
    config = ConvertConfig.model_validate({"dtype": "float32"} | options)
    return convert(config, base / "hf", base / "checkpoint", drafting=what).path


def embedded(**features: Any) -> EngineConfig:
    """An engine of the torch backend."""
    return engine(backend="torch", device="cpu", max_batch_size=4, features=features)


def answers(checkpoint: Path, out: Path, **features: Any) -> list[Generation]:
    """What an engine of the checkpoint makes of three prompts."""
    built = compile_engine(embedded(**features), checkpoint, out).path
    with Engine.load(built) as loaded:
        return generate_with(loaded, [GenerationRequest(str(n), (3, 4, 5 + n), 16) for n in range(3)])
