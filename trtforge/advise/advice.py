"""The results of a rule: advice with its figures, or missing data."""

from typing import Literal

from trtforge.core.config_model import Config

Confidence = Literal["certain", "likely", "possible"]


class Advice(Config):
    """The limiting factor, the figures that show it, the change, and its expected effect.

    `rule`: id for programs. `setting`: a recipe's key or a server's option; empty if there is none.
    """

    rule: str
    limit: str
    evidence: str
    change: str
    setting: str
    effect: str
    confidence: Confidence


class Missing(Config):
    """A rule that could not be applied, and the missing data."""

    rule: str
    lacks: str


Found = Advice | Missing
