"""What quantising linear layers is predicted to do, kept beside a calibration."""

from typing import Any

from trtforge.core.config_model import Config
from trtforge.core.recipe import QuantFormat


class Predicted(Config):
    """Linear layers that are quantised together, and their number of `weights`.

    `damage`: in each format, the relative error of the decoder layer's output if only they are quantised.
    """

    modules: tuple[str, ...]
    weights: int
    damage: dict[QuantFormat, float]


class Damages(Config):
    """The file. `calibration`: its digest; `samples`: what identifies the samples of the prediction."""

    calibration: str
    samples: dict[str, Any]
    groups: tuple[Predicted, ...]
