"""EAGLE networks in TensorRT-LLM's checkpoints: their number, their configuration and their tensors in a rank file.

Sources: `EagleForCausalLM` and `EagleNet` in tensorrt_llm/models/eagle/model.py, `EagleConfig` in config.py beside it,
`LLaMAModel` with `fc_after_embed` in models/llama/model.py, and examples/eagle/convert_checkpoint.py (1.2, 65b31db1).
All networks are copies of one; each has a decoder layer without its first norm, an embedding that is not split, and the
LM head of the model.
"""

from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import EAGLE_ARCHITECTURE, CheckpointConfig, config_of

EAGLE_MODULES = "*eagle_nets*"
"""Matches the networks' linear layers in `exclude_modules`, by their names and by those of their weights."""
NETWORK = "eagle_nets.{}."
"""The prefix of the names of a network's tensors."""
LAYER = "drafter.layers.0."

_AGAIN = "Convert the model and its EAGLE network again."
_MOST = 256


def networks_in(config: CheckpointConfig) -> int | None:
    """The number of networks of a checkpoint; None without. Raises ForgeError for an impossible number."""
    if config.architecture != EAGLE_ARCHITECTURE:
        return None
    count = (config.model_extra or {}).get("num_eagle_layers", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
        raise ForgeError(
            f"config.json: num_eagle_layers is {count!r}, not a whole number from 1 to {_MOST}", hint=_AGAIN
        )
    return count


def eagle_in(config: CheckpointConfig) -> tuple[int, CheckpointConfig] | None:
    """The number of networks and their configuration; None without.

    Raises ForgeError for a network that the embedded engine does not support.
    """
    count, values = networks_in(config), (config.model_extra or {}).get("eagle_net_config")
    if count is None:
        return None
    if not isinstance(values, dict):
        raise ForgeError("config.json: eagle_net_config is not an object", hint=_AGAIN)
    network = config_of(values, "config.json: eagle_net_config")
    tp = config.parallel.tp
    wrong = {
        "num_hidden_layers": network.num_hidden_layers != 1,
        "hidden_size": network.hidden_size != config.hidden_size or network.hidden_size % tp != 0,
        "vocab_size": network.vocab_size != config.vocab_size,
        "num_attention_heads": network.num_attention_heads % tp != 0,
        "num_key_value_heads": network.num_key_value_heads % tp != 0 and tp % network.num_key_value_heads != 0,
        "intermediate_size": network.intermediate_size % tp != 0,
        "attn_bias": network.attn_bias,
        "use_parallel_embedding": config.use_parallel_embedding and tp > 1,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ForgeError(
                f"config.json: eagle_net_config.{key} is {getattr(network, key)}, which is not supported with the "
                f"model's {config.hidden_size} hidden units, {config.vocab_size} tokens and {tp} ranks",
                hint="Supported networks have one layer, no biases and an embedding that is not split.",
            )
    return count, network


def network_shapes(network: CheckpointConfig, tp: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one network on a rank, without the prefix of their names."""
    hidden, size, inner = network.hidden_size, network.head_size, network.intermediate_size // tp
    queries = network.num_attention_heads // tp * size
    keys = max(1, network.num_key_value_heads // tp) * size
    return {
        "drafter.vocab_embedding.weight": (network.vocab_size, hidden),
        "drafter.fc.weight": (hidden // tp, 2 * hidden),
        "drafter.fc.bias": (hidden // tp,),
        f"{LAYER}attention.qkv.weight": (queries + 2 * keys, hidden),
        f"{LAYER}attention.dense.weight": (hidden, queries),
        f"{LAYER}mlp.fc.weight": (inner, hidden),
        f"{LAYER}mlp.gate.weight": (inner, hidden),
        f"{LAYER}mlp.proj.weight": (hidden, inner),
        f"{LAYER}post_layernorm.weight": (hidden,),
        "lm_head.weight": (-(-network.vocab_size // tp), hidden),
    }


def eagle_rank_shapes(config: CheckpointConfig) -> dict[str, tuple[int, ...]]:
    """The networks' tensors in every rank file of a checkpoint; none without networks."""
    found = eagle_in(config)
    if found is None:
        return {}
    count, network = found
    shapes = network_shapes(network, config.parallel.tp)
    return {NETWORK.format(index) + name: shape for index in range(count) for name, shape in shapes.items()}
