"""Small EAGLE networks as they are published, and what they draft by modules of transformers, without a cache."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.runtime.checkpoints import tiny_llama
from trtforge.core.features import Choices
from trtforge.formats.hf import CONFIG, SINGLE

HIDDEN, VOCAB, LAYERS = 64, 131, (1, 2, 3)
DRAFTED = 50
"""Tokens that an EAGLE-3 network proposes, every other one of the first."""


def network_config(kind: str, **changes: Any) -> dict[str, Any]:
    """config.json of a network for `tiny_llama`; with 4 layers it has to name those that it reads."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
    }
    if kind == "eagle3":
        ids = [layer - 1 for layer in LAYERS]
        values |= {"draft_vocab_size": DRAFTED, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    return values | changes


def network_tensors(kind: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights by their published names."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.15 if len(shape) > 1 else 0.1) + (len(shape) == 1)

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    inner, size = config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    read = hidden if kind == "eagle" else 2 * hidden
    layer = "layers.0" if kind == "eagle" else "midlayer"
    tensors = {
        "fc.weight": random(hidden, 2 * hidden if kind == "eagle" else 3 * hidden),
        f"{layer}.self_attn.q_proj.weight": random(queries, read),
        f"{layer}.self_attn.k_proj.weight": random(keys, read),
        f"{layer}.self_attn.v_proj.weight": random(keys, read),
        f"{layer}.self_attn.o_proj.weight": random(hidden, queries),
        f"{layer}.mlp.gate_proj.weight": random(inner, hidden),
        f"{layer}.mlp.up_proj.weight": random(inner, hidden),
        f"{layer}.mlp.down_proj.weight": random(hidden, inner),
        f"{layer}.post_attention_layernorm.weight": random(hidden),
    }
    if kind == "eagle":
        return tensors | {"fc.bias": random(hidden), "embed_tokens.weight": random(vocab, hidden)}
    drafted = config["draft_vocab_size"]
    tokens = torch.arange(drafted) * (1 if drafted == vocab else 2)
    return tensors | {
        f"{layer}.hidden_norm.weight": random(hidden),
        f"{layer}.input_layernorm.weight": random(hidden),
        "norm.weight": random(hidden),
        "lm_head.weight": random(drafted, hidden),
        "d2t": tokens - torch.arange(drafted),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, tokens, True),
    }


def write_network(
    directory: Path, kind: str = "eagle3", config: dict[str, Any] | None = None, **changes: Tensor | None
) -> Path:
    """A network of random weights; a tensor that is None is left out."""
    values = network_config(kind, **(config or {}))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(values))
    tensors = network_tensors(kind, values) | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, directory / SINGLE)
    return directory


@torch.no_grad()
def right_network(directory: Path, kind: str) -> LlamaForCausalLM:
    """A model whose next token depends on the last one only, and a network that knows it.

    The model's layers add nothing. EAGLE's `fc` passes the embedding on. EAGLE-3's attention does: all queries and keys
    are the same large vector, so that each position attends to itself, and the residual is zero.
    """
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.norm.weight.fill_(1)
    table = model.model.embed_tokens.weight
    table[:, 0] = 0
    table /= table.norm(dim=1, keepdim=True)
    model.lm_head.weight[(torch.arange(VOCAB) * 7 + 3) % VOCAB] = table
    table[:, 0] = 0.5
    values = network_config(
        kind, **({"draft_vocab_size": VOCAB, "norm_before_residual": True} if kind == "eagle3" else {})
    )
    tensors = {name: torch.zeros_like(each) for name, each in network_tensors(kind, values).items()}
    tensors = {name: each + name.endswith("norm.weight") for name, each in tensors.items()}
    if kind == "eagle":
        tensors["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
        tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.clone()
    else:
        tensors["midlayer.hidden_norm.weight"].zero_()
        for part in "qk":
            tensors[f"midlayer.self_attn.{part}_proj.weight"][:, 0] = 40
        tensors["midlayer.self_attn.v_proj.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
        output = tensors["midlayer.self_attn.o_proj.weight"].view(HIDDEN, 8, 16)
        for head in range(4):  # queries 2i and 2i + 1 read the same values
            output[16 * head : 16 * head + 16, 2 * head] = torch.eye(16)
    tensors["lm_head.weight"] = model.lm_head.weight.clone()
    write_network(directory, kind, config=values, **tensors)
    return model


class Reference(nn.Module):
    """What a network in a directory drafts after tokens, from all of them at once."""

    def __init__(self, model: LlamaForCausalLM, directory: Path, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind
        values = json.loads((directory / CONFIG).read_text())
        weights = {name.replace("midlayer", "layers.0"): each for name, each in load_file(directory / SINGLE).items()}
        config = LlamaConfig(**values, attn_implementation="eager")
        read = HIDDEN if kind == "eagle" else 2 * HIDDEN
        self.attention, self.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for part in "qkv":
            old = getattr(self.attention, f"{part}_proj")
            setattr(self.attention, f"{part}_proj", nn.Linear(read, old.out_features, bias=False))
        for name, part in (("self_attn", self.attention), ("mlp", self.mlp)):
            start = f"layers.0.{name}."
            part.load_state_dict({k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)})
        self.rotary, self.weights = LlamaRotaryEmbedding(config), weights
        self.before = bool(values.get("norm_before_residual"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = LlamaRMSNorm(HIDDEN, 1e-5)
        norm.weight.data = self.weights[f"{name}.weight"]
        return norm(x)

    def _layer(self, tokens: Tensor, states: Tensor) -> Tensor:
        table = self.weights.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        embedded = table[tokens]
        if self.kind == "eagle":
            joined = torch.cat((embedded, states), dim=1)
            residual = read = nn.functional.linear(joined, self.weights["fc.weight"], self.weights["fc.bias"])
        else:
            normed = self._norm("layers.0.hidden_norm", states)
            read = torch.cat((self._norm("layers.0.input_layernorm", embedded), normed), dim=1)
            residual = normed if self.before else states
        count = len(tokens)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        positions = self.rotary(embedded[None], torch.arange(count)[None])
        hidden = residual + self.attention(read[None], positions, mask)[0][0]
        return hidden + self.mlp(self._norm("layers.0.post_attention_layernorm", hidden))

    @torch.no_grad()
    def draft(self, tokens: list[int], length: int) -> tuple[int, ...]:
        """The chain after these tokens, of which the model has computed all but the last."""
        return self.tree(tokens, tuple((0,) * (depth + 1) for depth in range(length)))

    @torch.no_grad()
    def tree(self, tokens: list[int], choices: Choices) -> tuple[int, ...]:
        """The tokens of a tree after these, in the order of `choices`, each path from all of its tokens."""
        found = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        if self.kind == "eagle":
            states = found[-1][0]
        else:
            states = torch.cat([found[layer][0] for layer in LAYERS], dim=1) @ self.weights["fc.weight"].T
        return tuple(self._end_of(list(tokens[1:]), states, path) for path in choices)

    def _end_of(self, following: list[int], states: Tensor, path: tuple[int, ...]) -> int:
        """The last token of a path of ranks after these tokens."""
        for rank in path:
            hidden = self._layer(torch.tensor(following), states)[-1:]
            if self.kind == "eagle":
                token = int(self.model.lm_head(hidden)[0].topk(rank + 1).indices[rank])
            else:
                logits = (self._norm("norm", hidden) @ self.weights["lm_head.weight"].T)[0]
                token = int(logits.topk(rank + 1).indices[rank])
                token += int(self.weights["d2t"][token])
            following = [*following, token]
            states = torch.cat((states, hidden))
        return following[-1]
