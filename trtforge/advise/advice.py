"""What a rule finds: advice with its figures, or what it lacks."""

from typing import Literal

from trtforge.core.config_model import Config

Confidence = Literal["certain", "likely", "possible"]


class Advice(Config):
    """What limits, the figures that show it, what to change, and the effect to expect.

    `rule`: for programs. `setting`: a recipe's key or a server's option; empty if nothing is to be set.
    """

    rule: str
    limit: str
    evidence: str
    change: str
    setting: str
    effect: str
    confidence: Confidence


class Missing(Config):
    """A rule that could not be judged, and what it lacks."""

    rule: str
    lacks: str


Found = Advice | Missing
