"""Prompt tables of tiny models: PEFT's prompt tuning, random rows, and what transformers answers with them."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from trtforge.engine_process.requests import GenerationRequest, PromptTable

VOCABULARY = 131
"""Of all tiny models."""


def save_tuning(model: PreTrainedModel, out: Path, rows: int, seed: int, *, encoder: bool = False) -> Path:
    """A random adapter of prompt tuning, or of p-tuning with its encoder, as PEFT saves it."""
    torch.manual_seed(seed)
    config: PeftConfig = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=rows)
    if encoder:
        config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=rows, encoder_hidden_size=32)
    tuned = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "prompt_encoder" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
    tuned.save_pretrained(str(out))
    return out


def with_tuning(model: PreTrainedModel, adapter: Path) -> PeftModel:
    copied = copy.deepcopy(model)
    copied.generation_config.use_cache = False  # PEFT 0.21 does not know the cache's name in transformers 5.24
    return PeftModel.from_pretrained(copied, str(adapter)).eval()


def random_table(rows: int, seed: int, width: int = 64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.2


def table_of(rows: Tensor, extra_ids: Sequence[int] = ()) -> PromptTable:
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    dtype: Any = str(rows.dtype).removeprefix("torch.")
    return PromptTable(len(rows), rows.shape[1], dtype, data, tuple(extra_ids))


def asked(name: object, prompt: Sequence[int], rows: Tensor | None, new: int, **values: Any) -> GenerationRequest:
    table = None if rows is None else table_of(rows)
    return GenerationRequest(str(name), tuple(prompt), new, prompt_table=table, **values)


def embedded_greedy(model: PreTrainedModel, prompt: Sequence[int], rows: Tensor, new: int) -> tuple[int, ...]:
    """What transformers generates greedily after a prompt whose ids beyond the vocabulary are rows of a table."""
    with torch.no_grad():
        own = model.get_input_embeddings()(torch.tensor([token if token < VOCABULARY else 0 for token in prompt]))
        for place, token in enumerate(prompt):
            if token >= VOCABULARY:
                own[place] = rows[token - VOCABULARY]
        made = model.generate(
            inputs_embeds=own.unsqueeze(0),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(made[0].tolist())


def take_tables(engine: Path, size: int = 1600, **features: Any) -> Path:
    """The engine, compiled for tables of so many rows together."""
    path = engine / "config.json"
    values = json.loads(path.read_text())
    values["forge"].setdefault("features", {}).update({"max_prompt_embedding_table_size": size}, **features)
    path.write_text(json.dumps(values))
    return engine
