"""The predicted damage of quantising linear layers, kept beside a calibration."""

from typing import Any

from trtforge.core.config_model import Config
from trtforge.core.recipe import QuantFormat


class Predicted(Config):
    """Linear layers that are quantised together, and their number of `weights`.

    `damage`: by format, the relative error of the decoder layer's output if only these are quantised.
    """

    modules: tuple[str, ...]
    weights: int
    damage: dict[QuantFormat, float]


class Damages(Config):
    """The file. `calibration`: its digest; `samples`: the identity of the samples of the prediction."""

    calibration: str
    samples: dict[str, Any]
    groups: tuple[Predicted, ...]
