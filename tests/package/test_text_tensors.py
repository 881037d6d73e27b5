"""The text models' own tensors: declared, read and documented alike."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from trtforge.core.assets import asset_directory
from trtforge.formats.text_tensors import with_text_tensors
from trtforge.formats.triton import DtypeChoices, newest_release, tensors

GUIDE_TYPE = "guided_decoding_guide_type"
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


@pytest.mark.parametrize("kind", ["structural_tag", "jsonschema", ""])
def test_guides_that_tensorrt_llms_backend_does_not_follow_are_refused(kind: str) -> None:
    """TensorRT-LLM, utils.cc, getGuidedDecodingParamsFromTensors: no error for another type, and no guide."""
    lib = str(asset_directory("model_repo_templates") / "lib")
    stub = ModuleType("triton_python_backend_utils")
    with patch.dict(sys.modules, {stub.__name__: stub}), patch.object(sys, "path", [lib, *sys.path]):
        from responder import RequestFailed  # type: ignore[import-not-found]
        from text_model import TextModel  # type: ignore[import-not-found]

        def check(value: str, own_channel: bool) -> None:
            model = SimpleNamespace(_known={GUIDE_TYPE}, _guides=True, _own_channel=own_channel)
            TextModel._check(model, {GUIDE_TYPE: np.array([[value.encode()]], dtype=object)})

        with pytest.raises(RequestFailed, match=f"is '{kind}'; TensorRT-LLM's engines follow json, json_schema, regex"):
            check(kind, own_channel=False)
        check(kind, own_channel=True)  # our own engines check it
        check("regex", own_channel=False)


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
