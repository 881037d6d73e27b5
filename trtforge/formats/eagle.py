"""EAGLE networks in a separate directory in Hugging Face's format: config.json and safetensors. Reads no weights.

Sources: SafeAILab/EAGLE (cb7e084), eagle/model/cnets1.py for EAGLE-1 and 2, cnets.py for EAGLE-3 and its `idx` in
modeling_llama_kv.py for the layers; TensorRT-LLM (00679c6), tensorrt_llm/_torch/models/modeling_speculative.py,
`Eagle3ForCausalLM`; vLLM (00bd149), llama_eagle3.py, for `norm_before_residual`. Layers in `eagle_config` are those
whose output is read (sglang, `set_eagle3_layers_to_capture`); layers beside it are those whose input is read
(speculators).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from trtforge.core.dtypes import MODEL_DTYPES
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.core.plausible import require_plausible
from trtforge.formats.hf import CONFIG, HfConfig
from trtforge.formats.shards import StoredTensor, read_header
from trtforge.formats.trtllm import CheckpointConfig

EagleKind = Literal["eagle", "eagle3"]
EAGLE_DIRECTORY = "eagle"
"""The directory of an engine's network."""

_HINT = "Give the directory of the network that was trained for this model, with safetensors."
_UNREAD = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq")
_OTHERWISE = ("eh_proj_before_attn", "norm_before_fc", "return_hidden_post_norm", "fc_norm", "norm_output")
_AT_LEAST = 7
"""Least number of layers of a model for which EAGLE-3's three default layers are distinct."""


@dataclass(frozen=True)
class EagleNetwork:
    """A network of one decoder layer. `hidden`: its own hidden size; `vocab`: size of the vocabulary of its drafts.

    `layers`: indices of the model's layers whose inputs the network reads, concatenated (EAGLE-3); an index equal to
    the number of layers means the output of the last layer. None: it reads the input of the model's LM head. `tensors`:
    by name, those of the layer as `layers.0.`; `files`: config.json and the files with the tensors.
    """

    kind: EagleKind
    layers: tuple[int, ...] | None
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    epsilon: float
    rotary_base: float
    rotary_scaling: Mapping[str, Any] | None
    max_positions: int
    norm_before_residual: bool
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]

    def shapes(self, model: CheckpointConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of required tensors."""
        hidden, queries, keys = self.hidden, self.heads * self.head_size, self.kv_heads * self.head_size
        joined = hidden + model.hidden_size if self.layers is None else len(self.layers) * model.hidden_size
        read = hidden if self.layers is None else 2 * hidden
        layer = {
            "self_attn.q_proj.weight": (queries, read),
            "self_attn.k_proj.weight": (keys, read),
            "self_attn.v_proj.weight": (keys, read),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (self.inner, hidden),
            "mlp.up_proj.weight": (self.inner, hidden),
            "mlp.down_proj.weight": (hidden, self.inner),
            "post_attention_layernorm.weight": (hidden,),
        }
        found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, joined)}
        if self.layers is not None:
            layer |= {"hidden_norm.weight": (hidden,), "input_layernorm.weight": (hidden,)}
            found["norm.weight"] = (hidden,)
        if self.vocab != model.vocab_size:
            found["d2t"] = (self.vocab,)
        if hidden != model.hidden_size or self.vocab != model.vocab_size:
            found["lm_head.weight"] = (self.vocab, hidden)
        if hidden != model.hidden_size:
            found["embed_tokens.weight"] = (model.vocab_size, hidden)
        return found | {f"layers.0.{name}": shape for name, shape in layer.items()}

    def optional_shapes(self, model: CheckpointConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of optional tensors; without LM head and embedding, the model's are used."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        biases = {"q": queries, "k": keys, "v": keys}
        return {
            "fc.bias": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
            "embed_tokens.weight": (model.vocab_size, self.hidden),
            "d2t": (self.vocab,),
            **{f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in biases.items()},
        }


def read_eagle(directory: Path, kind: EagleKind, model: CheckpointConfig) -> EagleNetwork:
    """The network of `directory` for this model. Raises ForgeError naming the file and its fault."""
    if not (directory / CONFIG).is_file():
        raise ForgeError(f"{directory} has no {CONFIG}", hint=_HINT)
    files = tuple(sorted(directory.glob("*.safetensors")))
    if not files:
        raise ForgeError(f"{directory} has no safetensors file, the only supported format", hint=_HINT)
    config = _config(directory / CONFIG)
    vocab = config.integer("vocab_size")
    if vocab != model.vocab_size:
        raise ForgeError(
            f"{config.path}: vocab_size is {vocab}, the model's vocabulary has {model.vocab_size} tokens", hint=_HINT
        )
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    network = EagleNetwork(
        kind=kind,
        layers=None if kind == "eagle" else _layers(config, model.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_size=config.integer("head_dim", max(1, hidden // heads)),
        inner=config.integer("intermediate_size"),
        vocab=config.integer("draft_vocab_size", vocab) if kind == "eagle3" else vocab,
        epsilon=config.number("rms_norm_eps", 1e-6, above=0),
        rotary_base=config.rope_theta,
        rotary_scaling=config.rope_scaling,
        max_positions=config.integer("max_position_embeddings", 2048),
        norm_before_residual=config.flag("norm_before_residual"),
        tensors=_tensors(files),
        files=(directory / CONFIG, *files),
    )
    _require(network, model, config)
    return network


def network_numbers(directory: Path) -> tuple[int, int]:
    """The number of a network's parameters, and of values per token in its KV cache. Raises ForgeError if damaged."""
    config = _config(directory / CONFIG)
    heads = config.integer("num_attention_heads")
    size = config.integer("head_dim", max(1, config.integer("hidden_size") // heads))
    cached = 2 * config.integer("num_key_value_heads", heads) * size
    tensors = _tensors(tuple(sorted(directory.glob("*.safetensors"))))
    return sum(prod(stored.spec.shape) for name, stored in tensors.items() if name != "d2t"), cached


def _config(path: Path) -> HfConfig:
    """The network's config.json; speculators' has the layer's sizes in a nested object."""
    values = read_json_object(path, hint=_HINT)
    layer = values.get("transformer_layer_config")
    values = {**(layer if isinstance(layer, dict) else {}), **values}
    require_plausible(values, str(path), _HINT)
    return HfConfig(values, path)


def _layers(config: HfConfig, count: int) -> tuple[int, ...]:
    """The layers of a model of `count` whose inputs are read."""
    options = config.values.get("eagle_config")
    options = options if isinstance(options, dict) else {}
    key = "eagle_aux_hidden_state_layer_ids"
    nested, own = HfConfig(options, config.path).items(key), config.items(key)
    if not nested and not own:
        if count < _AT_LEAST:
            raise ForgeError(
                f"{config.path}: no {key}, and its default needs at least {_AT_LEAST} layers, the model has {count}",
                hint="Use a network that names the layers, or speculate with engine.features.ngram.",
            )
        return 2, count // 2, count - 3
    found = nested or own
    after = 1 if nested else 0
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in found)
    layers = tuple(sorted(layer + after for layer in found)) if whole else ()
    if not layers or layers[0] < 0 or layers[-1] > count or len(set(layers)) < len(layers):
        raise ForgeError(f"{config.path}: {key} is {found}, the model has {count} layers", hint=_HINT)
    return layers


def _tensors(files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in files:
        for stored in read_header(path):
            name = stored.spec.name.removeprefix("model.")
            if name.startswith("midlayer."):
                name = f"layers.0.{name.removeprefix('midlayer.')}"
            if name in found:
                raise ForgeError(f"{path}: {stored.spec.name} occurs twice", hint=_HINT)
            if name not in _UNREAD:
                found[name] = stored
    return found


def _require(network: EagleNetwork, model: CheckpointConfig, config: HfConfig) -> None:
    for message in _unsupported(network, model, config):
        raise ForgeError(f"{config.path}: {message}", hint="Use another network, or engine.features.ngram.")
    needed = network.shapes(model)
    known = network.optional_shapes(model) | needed
    for name, shape in known.items():
        stored = network.tensors.get(name)
        if stored is None and name not in needed:
            continue
        found = "nothing" if stored is None else stored.spec.shape
        if found != shape:
            where = network.files[1] if stored is None else stored.file
            raise ForgeError(f"{where}: {name} is {found}, the model needs {shape}", hint=_HINT)
    for name, stored in network.tensors.items():
        if name not in known:
            raise ForgeError(f"{stored.file}: {name} is not a tensor of a network of one Llama layer", hint=_HINT)
        kinds = ("int64", "int32") if name == "d2t" else MODEL_DTYPES
        if stored.spec.dtype.name not in kinds:
            raise ForgeError(f"{stored.file}: {name} is {stored.spec.dtype.name}, not {' or '.join(kinds)}", hint=_HINT)


def _unsupported(network: EagleNetwork, model: CheckpointConfig, config: HfConfig) -> Iterator[str]:
    """Properties that the embedded engine does not support."""
    if network.kind == "eagle" and network.hidden != model.hidden_size:  # its outputs predict the model's
        yield f"hidden_size is {network.hidden}, the model's is {model.hidden_size}, and EAGLE needs the same"
    layers = config.integer("num_hidden_layers", 1)
    if layers > 1:
        yield f"num_hidden_layers is {layers}, networks of one layer are supported"
    if config.values.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {config.values['hidden_act']}, silu is supported"
    if network.heads % network.kv_heads or network.head_size % 2:
        sizes = f"num_key_value_heads {network.kv_heads} and head_dim {network.head_size}"
        yield f"num_attention_heads {network.heads}, {sizes} do not fit together"
    options = config.values.get("eagle_config")
    options = options if isinstance(options, dict) else {}
    if options.get("use_aux_hidden_state") is False:
        yield "use_aux_hidden_state is false, only networks that read inner layers are supported"
    for key in _OTHERWISE:
        if options.get(key) or config.values.get(key):
            yield f"{key} is set, which is not supported"
