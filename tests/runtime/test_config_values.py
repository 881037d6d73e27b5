"""Values of config.json that few published models have: the logits are those of transformers."""

from pathlib import Path
from typing import Any

import pytest

from tests.families import TINY
from tests.runtime.converted import LONG, Family, computed, error
from tests.runtime.test_families import TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt_bigcode", {"activation_function": "gelu"}),
        ("phi", {"hidden_act": "gelu"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_logits_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    family = Family(TINY[name](**changes), tmp_path)
    assert error(computed(family.checkpoint(), LONG)[0], family.logits(LONG)) < TOLERANCE
