"""What captures CUDA graphs, with stand-ins for the parts of torch that need a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from trtforge.runtime.cuda import graph_capture
from trtforge.runtime.cuda.graph_capture import GraphCapture


def test_a_warm_up_that_fails_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels write to the cache in which the step is then computed again."""
    waits: list[tuple[str, str]] = []

    def stream_named(name: str) -> SimpleNamespace:
        return SimpleNamespace(device=None, name=name, wait_stream=lambda other: waits.append((name, other.name)))

    own, current = stream_named("own"), stream_named("current")
    cuda = SimpleNamespace(
        Stream=lambda device: own,
        current_stream=lambda device: current,
        stream=lambda own: nullcontext(),
        graph_pool_handle=lambda: (0, 1),
    )

    def compute() -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(graph_capture, "torch", SimpleNamespace(cuda=cuda))
    capture = GraphCapture(torch.device("cpu"), 0)
    with pytest.raises(RuntimeError, match="no memory"):
        capture(compute, 1, 1)
    assert waits == [("own", "current"), ("current", "own")]


def test_the_first_capture_takes_the_room_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the capture, after its warm-ups: only then it is memory of the graphs."""
    done: list[object] = []
    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda other: None)

    def captures(graph: object, **options: object) -> nullcontext[None]:
        done.append("capture")
        return nullcontext()

    cuda = SimpleNamespace(
        Stream=lambda device: stream,
        current_stream=lambda device: stream,
        stream=lambda own: nullcontext(),
        graph_pool_handle=lambda: (0, 1),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: done.append("replay")),
        graph=captures,
    )

    def empty(size: int, **options: object) -> None:
        done.append(size)

    monkeypatch.setattr(graph_capture, "torch", SimpleNamespace(cuda=cuda, uint8=torch.uint8, empty=empty))
    capture = GraphCapture(torch.device("cpu"), 1000)
    for _ in range(2):
        _, replay = capture(lambda: done.append("computed"), 1, 1)
        replay(1, 1)
    again = ["computed", "computed", "capture", "computed", "replay"]
    assert done == ["computed", "computed", "capture", 1000, "computed", "replay", *again]
