"""Floor 5: the file of a build with the metrics of its verification."""

from pathlib import Path

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import read_json_object
from trtforge.verify.result import Blocks, Verification

METRICS_FILE = "verification.json"


class CheckpointMetrics(Config):
    """The result of a verification. `compression`: bytes of the linear layers in 16 bits / their bytes as quantised.

    In the file, `verification` lists no failures, as the gate is applied when it is read.
    """

    verification: Verification
    compression: float


def kept_blocks(verification: Path, kl_mean: float | None) -> Blocks | None:
    """The sums by block of the verification in this directory, if it is the one that measured `kl_mean`."""
    try:
        path = verification / METRICS_FILE
        kept = CheckpointMetrics.parse(read_json_object(path, hint="Build again."), str(path)).verification
    except ForgeError:
        return None
    return kept.blocks if kept.kl_mean == kl_mean else None
