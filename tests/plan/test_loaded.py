"""`plan` against TensorRT-LLM's own loader: what it calls legal was loaded, what could not be loaded it refuses.

`loaded.json` records `from_checkpoint` of checkpoints that `convert` wrote from the models of `small_models.py`, on the
CPU and without TensorRT: for a model and a format one word for each layout. `lost`: it loads, and the quantised network
leaves out what the plain one has.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.plan.models import asked
from tests.plan.small_models import small
from tests.plan.verdicts import verdict
from trtforge.core.parallel import Parallel
from trtforge.formats.releases import release
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.plan.evaluate import evaluate
from trtforge.plan.legality import Problem
from trtforge.plan.network_rules import traits_of

RECORD = json.loads((Path(__file__).parent / "loaded.json").read_text())
LAYOUTS: dict[str, dict[str, int]] = {"tp1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2ep2": {"tp": 2, "ep": 2}}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8+kv8": {"quant": "fp8", "kv_cache": "fp8"},
    "none+kvint8": {"quant": "none", "kv_cache": "int8"},
    "int4_awq_g64": {"quant": "int4_awq", "group_size": 64},
}
"""Names of formats that are more than a weight format."""


class Row(NamedTuple):
    """One checkpoint and what became of it."""

    version: str
    model: str
    format: str
    layout: str
    word: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of `plan`."""
        return FORMATS.get(self.format, {"quant": self.format}) | LAYOUTS[self.layout]

    def problems(self) -> tuple[Problem, ...]:
        """What `plan` says of an engine."""
        model = small(self.model)
        recipe = {"engine": {"backend": "tensorrt_llm", "target": {"tensorrt_llm": self.version}}}
        return evaluate(model, asked(model, recipe=recipe, dtype="bfloat16", **self.options)).problems


def rows() -> Iterator[Row]:
    for tree in RECORD["trees"]:
        for model, formats in tree["models"].items():
            for name, words in formats.items():
                if name not in tree["lacks"]:
                    for layout, word in zip(LAYOUTS, words.split(), strict=False):
                        yield Row(tree["release"], model, name, layout, word)


ROWS = tuple(rows())


def test_the_record_covers_the_families() -> None:
    assert Counter(row.version for row in ROWS).keys() == {"0.17.0", "1.2.1"}
    assert len(ROWS) > 1900
    assert {row.word for row in ROWS} <= {"ok", "lost", "refused", "unconverted"}


@pytest.mark.parametrize("version", ["0.17.0", "1.2.1"])
def test_plan_calls_legal_only_what_loads(version: str) -> None:
    legal = [row for row in ROWS if row.version == version and not row.problems()]
    assert [row for row in legal if row.word != "ok"] == []
    assert len(legal) > 500


@pytest.mark.parametrize("version", ["0.17.0", "1.2.1"])
def test_what_cannot_be_loaded_is_refused_with_a_reason(version: str) -> None:
    for row in ROWS:
        if row.version == version and row.word != "ok":
            problems = row.problems()
            assert problems, row
            assert all(problem.message and problem.fix for problem in problems), row


def test_the_table_of_verdicts_agrees_with_the_loader() -> None:
    """Where the table says no of what loads, the reason was read in the forward pass."""
    for row in ROWS:
        model, options = small(row.model), row.options
        architecture = model.family.architectures[model.config.architecture]
        described = checkpoint_config(
            model.family, model.facts, model.config.architecture, Layout(Parallel(pp=options.get("pp", 1)), "bfloat16")
        )
        found = verdict(
            model.family,
            architecture,
            options["quant"],
            release(row.version),
            pipeline="pp" in options,
            traits=traits_of(described, model.family),
        )
        if row.word == "ok" and not found.loads:
            assert any(source.startswith("read-") for source in found.sources), (row, found)
        elif found.loads and row.word != "ok":
            rules = {problem.rule for problem in row.problems()}
            assert rules <= {"awq_padding", "kv_cache"}, (row, found)
