"""`trtforge serve` starts nothing from a repository whose files are not its manifest's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import torch_engine
from trtforge.core.errors import ForgeError
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.serve.config import ServeConfig
from trtforge.serve.stage import serve


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return package(PackageConfig(), torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "out").path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: (at / "ensemble/1/extra.py").write_text(""), r"file: ensemble/1/extra\.py is not listed"),
        (
            lambda at: (at / "other").mkdir() or (at / "other/config.pbtxt").touch(),
            r"other/config\.pbtxt is not listed",
        ),
        (lambda at: (at / "ensemble/1/model.py").unlink(), r"ensemble/1/model\.py is missing"),
        (lambda at: (at / "ensemble/1/model.py").write_text("import os"), r"ensemble/1/model\.py has 9 bytes"),
    ],
)
def test_another_repository_is_refused(repository: Path, change: Callable[[Path], object], message: str) -> None:
    serve(ServeConfig(dry_run=True), repository)
    change(repository)
    with pytest.raises(ForgeError, match=message):
        serve(ServeConfig(dry_run=True), repository)
