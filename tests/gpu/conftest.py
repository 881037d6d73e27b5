import pytest
import torch

from tests.runtime.conftest import families

__all__ = ["families"]  # a fixture of the CPU's tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a machine with one GPU, leave out what needs two."""
    if torch.cuda.device_count() != 1:
        return
    left = [item for item in items if item.get_closest_marker("two_gpus")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
