"""A real server for the test suites of other projects, which are collected only if they are named: `make test-clients`.

Their packages bring pytest plugins of their own, so they are installed in an environment beside the usual one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.assault.repositories import build
from tests.assault.server import Server, serving
from tests.patience import eventually


@dataclass(frozen=True)
class Served:
    """A server, the base URL of its OpenAI API, and its repository."""

    server: Server
    url: str
    repository: Path


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these tests out unless their directory is named."""
    return None if any("clients" in argument for argument in config.args) else True


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model in float32."""
    repository = build("demo-fp32", tmp_path_factory.mktemp("served"))
    with serving(repository) as server:
        assert eventually(lambda: len(server.output) > 1)
        yield Served(server, server.output[1].removeprefix("openai="), repository)
