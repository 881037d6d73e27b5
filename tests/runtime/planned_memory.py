"""Plans, engines built from the same recipes, and the bytes of tensors that an engine keeps."""

from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe
from trtforge.pipeline.build import Build
from trtforge.pipeline.stages import selected
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.model import find_model
from trtforge.plan.request import request_of
from trtforge.runtime.drafters import with_drafter
from trtforge.runtime.ranks.distributed import Distributed
from trtforge.runtime.ranks.source import Source, open_engine

BATCH, LENGTH, BLOCK = 6, 72, 16
CLOSE = 0.05


def recipe(source: Path, **values: Any) -> Recipe:
    limits = {"backend": "torch", "device": "cpu", "max_batch_size": BATCH, "max_seq_len": LENGTH}
    engine = limits | {"tokens_per_block": BLOCK} | values.pop("engine", {})
    return Recipe.parse({"name": "planned", "model": {"source": str(source)}, "engine": engine, **values}, "test")


def planned(asked: Recipe) -> Evaluation:
    model = find_model(asked.model.source)
    found = evaluate(model, request_of(asked, model, {}))
    assert found.problems == ()
    return found


def tensors_in(found: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that an object keeps alive: in its fields, in containers, and in what its functions close over.

    Without the buffers for exchanges between ranks, which do not grow with the model.
    """
    if id(found) in seen or isinstance(found, type | ModuleType | str | bytes | int | float | Distributed | None):
        return
    seen.add(id(found))
    inside: list[object] = []
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, FunctionType):
        inside = [cell.cell_contents for cell in found.__closure__ or ()]
    elif isinstance(found, MethodType):
        inside = [found.__self__]
    elif isinstance(found, dict):
        inside = list(found.values())
    elif isinstance(found, list | tuple | set | frozenset):
        inside = list(found)
    else:
        inside = list(getattr(found, "__dict__", {}).values())
    for one in inside:
        yield from tensors_in(one, seen)


def kept(*parts: object) -> int:
    """Bytes of all tensors in `parts`, storage that two of them share once."""
    seen: set[int] = set()
    sizes = {}
    for tensor in (tensor for part in parts for tensor in tensors_in(part, seen)):
        opaque = tensor.layout is not torch.strided  # oneDNN's blocked weights have no address
        sizes[id(tensor) if opaque else tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def build(asked: Recipe, out: Path) -> Path:
    run = Build(asked, out, Silent())
    stages = tuple(stage for stage in selected(asked, "calibrate", "compile") if stage != "verify")
    run.run(stages, started=lambda _: None)
    return run.paths.engine


def open_with_drafter(asked: Recipe, out: Path) -> Source:
    """The engine that a recipe makes, with what it drafts with."""
    source = open_engine(build(asked, out))
    return with_drafter(source, source.forge.features.of_torch)


def write_llama(directory: Path, *, seed: int = 0, **changes: int) -> Path:
    """Large enough that weights outweigh rotary tables: 4 layers, hidden 256. With tokens to calibrate with."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 509, "max_position_embeddings": 128,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(torch.bfloat16).save_pretrained(directory)
    ids = torch.randint(0, 509, (8, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, directory / "calibration.safetensors")
    return directory
