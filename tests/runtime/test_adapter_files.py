"""Adapters whose files are damaged, contradict themselves or overflow are refused before anything is compiled; files
that change later end no other request."""

import json
import queue
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.adapters import add_adapters, save_adapter, sent
from tests.runtime.checkpoints import write_engine
from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraFeature
from trtforge.engine_process.requests import BeamParams, GenerationRequest, Output, SentAdapter
from trtforge.formats.adapter import resolved_lora
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.adapters.required import require_adapters
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.ranks.engine_adapters import EngineAdapters
from trtforge.runtime.ranks.source import open_engine

Edited = Callable[[dict[str, Tensor]], dict[str, Tensor]]
NAME = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"


class Refused:
    """Messages and hints by which edited copies of an adapter are refused."""

    def __init__(self, model: LlamaForCausalLM, checkpoint: Path, place: Path) -> None:
        self.place = save_adapter(model, place, 1)
        self.tensors = load_file(place / "adapter_model.safetensors")
        self._settings = json.loads((place / "adapter_config.json").read_text())
        self._config = read_checkpoint_config(checkpoint)

    def __call__(
        self, tensors: Edited = dict, dtype: torch.dtype = torch.float32, memory: int = 1 << 30, **settings: object
    ) -> tuple[str, str]:
        save_file(tensors(self.tensors), self.place / "adapter_model.safetensors")
        (self.place / "adapter_config.json").write_text(json.dumps(self._settings | settings))
        return self.why(dtype, memory)

    def why(self, dtype: torch.dtype = torch.float32, memory: int = 1 << 30) -> tuple[str, str]:
        lora = resolved_lora(LoraFeature(adapters=(str(self.place),), host_memory=memory))
        with pytest.raises(ForgeError) as raised:
            require_adapters(self._config, lora, [self.place], dtype)
        return raised.value.message, raised.value.hint


@pytest.fixture
def refused(llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path) -> Refused:
    return Refused(llama, checkpoint, tmp_path / "adapter")


def test_files_that_contradict_themselves(refused: Refused) -> None:
    twice, _ = refused(lambda tensors: {**tensors, NAME.removeprefix("base_model.model."): torch.ones(64, 4)})
    assert twice.endswith("lora_B of attn_q of layer 2 occurs twice")
    embedding = {"base_model.model.model.embed_tokens.weight": torch.ones(131, 64)}  # saved with a resized vocabulary
    whole, hint = refused(lambda tensors: {**tensors, **embedding})
    assert whole.endswith("embed_tokens.weight is not a LoRA matrix of a decoder layer")
    assert hint.startswith("Merge it into the model")
    long = NAME.replace("layers.2", f"layers.{'2' * 5000}")  # Python refuses to make a number of it
    assert refused(lambda tensors: {**tensors, long: torch.ones(64, 4)})[0].endswith(
        "is not a LoRA matrix of a decoder layer"
    )
    empty, _ = refused(lambda tensors: {})
    assert empty.endswith("adapter_model.safetensors: no LoRA matrices")
    more, _ = refused(target_modules=["down_proj", "q_proj"])
    assert more.endswith("mlp_h_to_4h of layer 0 has matrices, but is not a target module in adapter_config.json")
    rank, _ = refused(r=8)
    assert rank.endswith("adapter_config.json: its layers have rank 8, but its tensors have 4")
    assert refused(r=8, rank_pattern={"q_proj": 16})[0].endswith("have rank 8 or 16, but its tensors have 4")


@pytest.mark.parametrize(
    ("value", "alpha", "dtype"),
    [(1e38, 64.0, torch.float32), (1e4, 64.0, torch.float16), (1.0, 1e40, torch.bfloat16)],
)
def test_numbers_that_overflow_with_their_scale_or_in_the_engine_s_dtype(
    refused: Refused, value: float, alpha: float, dtype: torch.dtype
) -> None:
    """In a batch they would be numbers of the other requests, too."""
    message, _ = refused(lambda tensors: {**tensors, NAME: torch.full((64, 4), value)}, dtype=dtype, lora_alpha=alpha)
    found = message.partition(": ")[2]
    assert found.endswith(f"has numbers that are not finite in {str(dtype).removeprefix('torch.')}")


def test_a_pickle_is_not_read(refused: Refused) -> None:
    (refused.place / "adapter_model.safetensors").unlink()
    torch.save(refused.tensors, refused.place / "adapter_model.bin")
    message, hint = refused.why()
    assert message.endswith("adapter has no adapter_model.safetensors")
    assert hint.endswith("with safetensors: pickles (adapter_model.bin) are not read.")


def test_a_cache_in_which_no_adapter_fits(refused: Refused) -> None:
    message, hint = refused(memory=1000)
    assert message.startswith("an adapter of rank 4 has ")
    assert message.endswith(" bytes, more than engine.features.lora.host_memory 1000")
    assert hint.startswith("Compile with --feature lora.host_memory=")


def test_an_adapter_whose_files_change_is_refused_and_ends_no_other_request(
    llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path
) -> None:
    """Ranks read an adapter when the first request needs it: an error there would end the engine."""
    adapters = [save_adapter(llama, tmp_path / f"a{number}", number) for number in range(3)]
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine"), adapters)
    asked = [GenerationRequest(str(task), (5, 6, 7), 4, lora_task_id=task) for task in (1, 2, 3)]
    with Engine.load(engine, EngineOptions(kv_cache_tokens=200)) as running:
        before = generate_with(running, asked[:1])
        (engine / "adapters" / "2" / "adapter_model.safetensors").unlink()
        (engine / "adapters" / "3" / "adapter_config.json").write_text("{}")
        first, *others = generate_with(running, asked)
    assert first.tokens == before[0].tokens
    for task, made in enumerate(others, start=2):
        assert made.error is not None
        assert (
            made.error.message == f"{engine}/adapters/{task}: the adapter's files changed after the engine was loaded"
        )
        assert made.error.hint.startswith("Load the engine again")


@pytest.mark.parametrize("beams", [None, BeamParams(2, 2)])
def test_an_adapter_whose_files_vanish_while_requests_wait_ends_only_these(
    llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path, beams: BeamParams | None
) -> None:
    """The first request runs alone; then come those of one adapter that is there and of two that are not."""
    adapters = [save_adapter(llama, tmp_path / f"a{number}", number) for number in range(3)]
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine", max_beam_width=2), adapters[:2])
    asked = [GenerationRequest(str(task), (5, 6, 7), 9, lora_task_id=task) for task in (1, 2, 1, 3)]
    asked[1], asked[3] = replace(asked[1], beams=beams), replace(asked[3], sent_adapter=sent(adapters[2]))
    with Engine.load(engine, EngineOptions(kv_cache_tokens=200, max_batch_size=2 if beams else 1)) as running:
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        kept = running._adapters._place
        assert kept is not None

        def lose(output: Output) -> None:
            outputs.put(output)
            shutil.rmtree(engine / "adapters" / "2", ignore_errors=True)
            shutil.rmtree(kept, ignore_errors=True)

        named = [replace(request, request_id=str(number)) for number, request in enumerate(asked)]
        running.submit((named[0], lose), *((each, outputs.put) for each in named[1:]))
        ends: dict[str, Output] = {}
        while len(ends) < len(asked):
            output = outputs.get(timeout=60)
            if output.finish_reason is not None:
                ends[output.request_id] = output
        assert running.statistics().kv_blocks_used == 0
    assert [ends[number].finish_reason for number in "0123"] == ["length", "error", "length", "error"]
    errors = [error.message for number in "13" if (error := ends[number].error) is not None]
    assert errors == [
        f"{engine}/adapters/2: the adapter's files changed after the engine was loaded",
        "the file of the sent adapter was deleted",
    ]


def test_an_adapter_that_was_sent_and_whose_file_is_gone_is_asked_for_again(
    llama: LlamaForCausalLM, checkpoint: Path, tmp_path: Path
) -> None:
    adapter = sent(save_adapter(llama, tmp_path / "a", 1))
    engine = add_adapters(write_engine(checkpoint, tmp_path / "engine"), [tmp_path / "a"])
    known = EngineAdapters(replace(open_engine(engine), sent_adapters=tmp_path / "sent"), set)

    def refused(task: int, adapter: SentAdapter | None = None) -> str | None:
        error = known.why_refused(GenerationRequest("0", (1,), 1, lora_task_id=task, sent_adapter=adapter))
        return None if error is None else f"{error.message}: {error.hint}"

    assert [refused(7, adapter), refused(8, adapter), refused(7), refused(8)] == [None] * 4
    (kept,) = (tmp_path / "sent").iterdir()
    (kept / "adapter_model.safetensors").unlink()
    assert refused(7) == (
        "lora_task_id 7 is not an adapter of this engine: Task ids: 1. Send lora_weights and lora_config with the "
        "first request of another id."
    )
    assert [refused(7, adapter), refused(7)] == [None, None]
    shutil.rmtree(kept)
    assert [refused(8, adapter), refused(8)] == [None, None]
    assert (kept / "adapter_model.safetensors").is_file()
    known.close()
