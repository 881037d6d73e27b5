"""Plans of TensorRT-LLM checkpoints: the same as those of the models that they were made from."""

import json
import shutil
from pathlib import Path

import pytest

from tests.golden.make_hf import write_case
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.formats.shards import read_header
from trtforge.models.checkpoint_plan import Layout
from trtforge.plan.checkpoint_model import model_of_checkpoint
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.model import find_model
from trtforge.plan.weights import Stored

EXPECTED = Path(__file__).parent.parent / "golden" / "expected"
CASES = sorted({json.loads(path.read_text())["hf"] for path in EXPECTED.glob("*.json")})


def bare(checkpoint: Path) -> Path:
    """Without what only trtforge writes."""
    (checkpoint / "forge.json").unlink()
    shutil.rmtree(checkpoint / "source")
    return checkpoint


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_has_the_facts_of_its_model(case: str, tmp_path: Path) -> None:
    source = write_case(case, tmp_path / "hf")
    checkpoint = bare(convert(ConvertConfig(tp=2, parallel_embedding=True), source, tmp_path / "checkpoint").path)
    model, original = model_of_checkpoint("checkpoint", checkpoint), find_model(str(source))
    assert model.family.name == original.family.name
    facts, wanted = model.facts, original.facts
    assert facts.holding == wanted.holding
    assert facts.sparse_layers == wanted.sparse_layers
    assert facts.sizes.more.items() >= wanted.sizes.more.items()
    assert {key: value for key, value in vars(facts.sizes).items() if key != "more"} == {
        key: value for key, value in vars(wanted.sizes).items() if key != "more"
    }
    layout = Layout(model.checkpoint.parallel, model.checkpoint.dtype)  # type: ignore[union-attr]
    stored = Stored(WEIGHTS["none"], 2 if model.checkpoint.dtype != "float32" else 4)  # type: ignore[union-attr]
    for rank in range(2):
        written = sum(tensor.spec.nbytes for tensor in read_header(checkpoint / f"rank{rank}.safetensors"))
        assert model.weights(layout).nbytes(stored, layout.parallel, 0) == written
