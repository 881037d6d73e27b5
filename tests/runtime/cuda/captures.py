"""A stand-in for a capture of CUDA graphs on the CPU."""

from collections.abc import Callable

from torch import Tensor

from trtforge.runtime.decoder.step_graphs import Outputs, Replay


def repeated(compute: Callable[[], Outputs], rows: int, wanted: int) -> tuple[Outputs, Replay]:
    """Stands in for a capture: replays compute again, into the tensors of the first time."""
    outputs = compute()

    def replay(rows: int, wanted: int) -> None:
        again = compute()
        for own, new in zip(tensors(outputs), tensors(again), strict=True):
            own.copy_(new)

    return outputs, replay


def tensors(outputs: Outputs) -> list[Tensor]:
    return [each for each in (outputs.logits, outputs.last, *outputs.states) if each is not None]
