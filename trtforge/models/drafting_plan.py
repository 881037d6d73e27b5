"""The config.json of a checkpoint with Medusa heads or EAGLE networks."""

from pathlib import Path

from trtforge.core.features import Drafting, MedusaFeature
from trtforge.formats.hf import CONFIG, HfConfig
from trtforge.formats.medusa import MEDUSA_FILE
from trtforge.formats.trtllm import EAGLE_ARCHITECTURE, CheckpointConfig
from trtforge.models.eagle_plan import EAGLE_TREE_TOKENS, MOST_NON_LEAVES, networks_of, planned_eagle
from trtforge.models.medusa_plan import planned_medusa


def planned_drafting(
    config: CheckpointConfig, source: HfConfig, drafting: Drafting, *, assumed: bool = False
) -> CheckpointConfig:
    """`config` of a model with the heads or the network in `drafting.model`. Raises ForgeError if they are of another
    model.

    `assumed`: files that do not exist yet are assumed to match the settings or defaults; an EAGLE network is assumed to
    have a layer like the model's.
    """
    directory = Path(drafting.model or "")
    if isinstance(drafting, MedusaFeature):
        return planned_medusa(config, source, drafting, assumed=assumed and not (directory / MEDUSA_FILE).is_file())
    if not assumed or (directory / CONFIG).is_file():
        return planned_eagle(config, drafting)
    values = config.model_dump(mode="json") | {"num_hidden_layers": 1, "attn_bias": False}
    return config.model_copy(
        update={
            "architecture": EAGLE_ARCHITECTURE,
            "max_draft_len": drafting.draft_tokens or EAGLE_TREE_TOKENS,
            "num_eagle_layers": networks_of(drafting),
            "max_non_leaves_per_layer": MOST_NON_LEAVES,
            "eagle_net_config": values,
        }
    )
