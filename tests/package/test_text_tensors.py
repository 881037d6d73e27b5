"""The text models' own tensors: declared, read and documented alike."""

import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from trtforge.core.assets import asset_directory
from trtforge.formats.text_tensors import with_text_tensors
from trtforge.formats.triton import DtypeChoices, newest_release, tensors

DOCS = Path(__file__).parents[2] / "docs"


def test_the_models_read_what_is_declared() -> None:
    declared = {tensor.name for tensor in with_text_tensors((), "inputs", chat=True)}
    with (
        patch.dict(sys.modules, {"triton_python_backend_utils": ModuleType("triton_python_backend_utils")}),
        patch.object(sys, "path", [str(asset_directory("model_repo_templates") / "lib"), *sys.path]),
    ):
        from text_options import MOST_TOP_LOGPROBS, OPTIONS  # type: ignore[import-not-found]

        from trtforge.engine_process.requests import MOST_TOP_LOG_PROBS
    assert set(OPTIONS) == declared
    assert MOST_TOP_LOGPROBS == MOST_TOP_LOG_PROBS


def test_a_release_that_has_a_tensor_keeps_its_own() -> None:
    own = tensors("ensemble", "inputs", newest_release(), DtypeChoices())
    merged = with_text_tensors(own, "inputs", chat=True)
    names = [tensor.name for tensor in merged]
    assert len(names) == len(set(names))
    for tensor, kept in zip(own, merged, strict=False):
        assert kept == tensor or (kept.name, kept.optional) == ("text_input", True)
    assert "messages" not in {tensor.name for tensor in with_text_tensors(own, "inputs", chat=False)}


def test_each_is_documented() -> None:
    (table,) = re.findall(r"\| input \| dtype \| meaning \|\n(.+?)\n\n", (DOCS / "deployment.md").read_text(), re.S)
    for direction in ("inputs", "outputs"):
        for tensor in with_text_tensors((), direction, chat=True):  # type: ignore[arg-type]
            assert f"`{tensor.name}`" in table
