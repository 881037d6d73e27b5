"""EAGLE networks in a checkpoint plan: their targets and their config.json.

Sources: see `formats.eagle_checkpoint`. TensorRT-LLM's converter gives a network the model's rotary embedding; here it
keeps its own. They stay unquantised; in a quantised model config.json excludes them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtforge.core.dtypes import ModelDtype, dtype_named
from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature
from trtforge.core.parallel import Parallel
from trtforge.formats.eagle import EagleNetwork, read_eagle
from trtforge.formats.eagle_checkpoint import EAGLE_MODULES, NETWORK
from trtforge.formats.hf import HfConfig
from trtforge.formats.shards import StoredTensor, TensorSpec
from trtforge.formats.trtllm import EAGLE_ARCHITECTURE, CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import CheckpointPlan, Layout, checkpoint_plan
from trtforge.models.content import Cast, Piece, Target
from trtforge.models.family import Facts, Family
from trtforge.models.registry import family_of
from trtforge.models.split import column_cuts

EAGLE_DEPTH, EAGLE_TREE_TOKENS, MOST_NON_LEAVES = 4, 63, 10
"""The converter's defaults: networks, draft tokens of a step, nodes of a level of the tree that have children."""

_ARCHITECTURE = "LlamaForCausalLM"
_PREFIX = "eagle:"
_ABSENT = ("transformer.ln_f.weight", "transformer.layers.0.input_layernorm.weight", "lm_head.weight")
_EMBEDDING = "embed_tokens.weight"


def network_family() -> Family:
    """The family of the networks' decoder layer."""
    return family_of(_ARCHITECTURE)


def network_facts(network: EagleNetwork) -> Facts:
    """The sizes and fields of a network as a Llama of one layer."""
    values = {
        "architectures": [_ARCHITECTURE],
        "hidden_size": network.hidden,
        "intermediate_size": network.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": network.heads,
        "num_key_value_heads": network.kv_heads,
        "head_dim": network.head_size,
        "vocab_size": network.vocab,
        "rms_norm_eps": network.epsilon,
        "rope_theta": network.rotary_base,
        "rope_scaling": None if network.rotary_scaling is None else dict(network.rotary_scaling),
        "max_position_embeddings": network.max_positions,
        "hidden_act": "silu",
    }
    return network_family().facts(HfConfig(values, network.files[0]))


def network_layout(tp: int, dtype: ModelDtype) -> Layout:
    """How a network is written: split like the model, unquantised."""
    return Layout(Parallel(tp=tp), dtype)


def networks_of(eagle: EagleFeature) -> int:
    """Number of copies of the network in a checkpoint, one for each run in a step."""
    return eagle.depth or eagle.tree_depth or EAGLE_DEPTH


def network_for(eagle: EagleFeature, config: CheckpointConfig) -> EagleNetwork:
    """The network in `eagle.model`. Raises ForgeError if it does not fit a checkpoint of the model."""
    network = read_eagle(Path(eagle.model or ""), "eagle", config)
    wrong = next((name for name in network.tensors if name.endswith("_proj.bias")), None)
    if wrong is not None:
        raise ForgeError(
            f"{network.tensors[wrong].file}: {wrong}: TensorRT-LLM's EAGLE networks have no biases in their layer",
            hint="Use the network beside the embedded engine: `trtforge compile --feature eagle.model=NETWORK`.",
        )
    for key, said, is_wrong in (
        ("pp", config.parallel.pp, config.parallel.pp > 1),
        ("parallel_embedding", True, config.use_parallel_embedding and config.parallel.tp > 1),
        ("kv_cache", config.quantization.kv_cache_quant_algo, config.quantization.kv_cache_quant_algo is not None),
    ):
        if is_wrong:
            raise ForgeError(
                f"engine.features.eagle: {key} is {said}, which TensorRT-LLM's EAGLE is not known to support",
                hint="Convert with --pp 1 and --kv-cache none, and without --parallel-embedding.",
            )
    return network


def stored_tensors(network: EagleNetwork) -> Mapping[str, StoredTensor]:
    """The network's tensors under names that no model has."""
    return {
        _PREFIX + name: replace(stored, spec=replace(stored.spec, name=_PREFIX + name))
        for name, stored in network.tensors.items()
    }


def eagle_targets(model: CheckpointPlan, network: EagleNetwork, layout: Layout, count: int) -> Iterator[Target]:
    """The tensors of all networks in every rank file. `model`: the plan of the model, whose LM head they share."""
    tp, hidden = layout.parallel.tp, network.hidden
    of_model = {target.spec.name: target for target in model.targets}
    own = checkpoint_plan(network_family(), network_facts(network), network_layout(tp, layout.dtype))
    targets = []
    for target in own.targets:
        if target.spec.name in _ABSENT:
            continue
        name = f"drafter.{target.spec.name.removeprefix('transformer.')}"
        if name == "drafter.vocab_embedding.weight" and _EMBEDDING not in network.tensors:
            target = of_model[target.spec.name]
        else:
            target = replace(target, content=_of_network(target))
        targets.append(_named(target, name))
    cuts = column_cuts(range(hidden), 2 * hidden, tp)
    spec = TensorSpec("drafter.fc.weight", dtype_named(layout.dtype), (hidden // tp, 2 * hidden))
    targets.append(Target(spec, 0, Cast((Piece(f"{_PREFIX}fc.weight", (hidden, 2 * hidden), cuts),), (0,) * tp)))
    spec = TensorSpec("drafter.fc.bias", dtype_named(layout.dtype), (hidden // tp,))
    bias = Cast((), (hidden // tp,) * tp)
    if "fc.bias" in network.tensors:
        bias = Cast((Piece(f"{_PREFIX}fc.bias", (hidden,), column_cuts(range(hidden), 1, tp)),), (0,) * tp)
    targets.append(Target(spec, 0, bias))
    targets.append(of_model["lm_head.weight"])
    for index in range(count):
        for target in targets:
            yield _named(target, NETWORK.format(index) + target.spec.name)


def planned_eagle(config: CheckpointConfig, eagle: EagleFeature) -> CheckpointConfig:
    """`config` of a model with the network in `eagle.model`. Raises ForgeError for a network of another model."""
    return with_eagle(config, eagle, network_for(eagle, config))


def with_eagle(config: CheckpointConfig, eagle: EagleFeature, network: EagleNetwork) -> CheckpointConfig:
    """The config.json of a model with EAGLE networks."""
    quantization = config.quantization
    if quantization.exclude_modules is not None:
        excluded = [*quantization.exclude_modules, EAGLE_MODULES]
        quantization = quantization.model_copy(update={"exclude_modules": excluded})
    layout = network_layout(config.parallel.tp, config.dtype)
    own = checkpoint_config(network_family(), network_facts(network), _ARCHITECTURE, layout)
    values: dict[str, Any] = own.model_dump(mode="json")
    return config.model_copy(
        update={
            "architecture": EAGLE_ARCHITECTURE,
            "quantization": quantization,
            "head_dim": config.head_size,
            "max_draft_len": eagle.draft_tokens or EAGLE_TREE_TOKENS,
            "num_eagle_layers": networks_of(eagle),
            "max_non_leaves_per_layer": MOST_NON_LEAVES,
            "eagle_net_config": values | {"head_dim": network.head_size},
        }
    )


def _of_network(target: Target) -> Cast:
    content = target.content
    assert isinstance(content, Cast), "a network is not quantised"
    pieces = (replace(piece, source=_PREFIX + piece.source.removeprefix("model.")) for piece in content.pieces)
    return replace(content, pieces=tuple(pieces))


def _named(target: Target, name: str) -> Target:
    return replace(target, spec=replace(target.spec, name=name))
