"""The planned weights are those that conversion writes, byte for byte, on every rank."""

from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.plan.models import LLAMA_8B, MIXTRAL, known
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import QuantFormat
from trtforge.formats.hf import HfConfig
from trtforge.formats.networks import networks
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.models.family import Facts, Family
from trtforge.models.registry import architectures, family_of
from trtforge.plan.formats import WEIGHTS
from trtforge.plan.weights import Stored, rank_weights


def written(family: Family, facts: Facts, layout: Layout, stage: int) -> int:
    targets = checkpoint_plan(family, facts, layout).targets
    return sum(target.spec.nbytes for target in targets if target.pp_rank == stage)


def planned(family: Family, facts: Facts, layout: Layout, stage: int) -> int:
    stored = Stored(WEIGHTS[layout.quant], 2, layout.group_size)
    return rank_weights(family, facts, layout).nbytes(stored, layout.parallel, stage)


# int8_wo and int4_wo are written as plain weights, which trtllm-build quantises when it loads them
WRITTEN: list[QuantFormat] = [name for name in get_args(QuantFormat) if name not in ("int8_wo", "int4_wo")]


def expert_format(quant: QuantFormat) -> bool:
    """Whether conversion writes experts in the format."""
    limits = networks().limits_of("mixtral", quant, traits=frozenset({"experts"}))
    return not any(limit.every_backend for limit in limits)


@pytest.mark.parametrize("quant", WRITTEN)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (8, 1), (2, 4), (16, 2)])
def test_llama_in_every_format(quant: QuantFormat, tp: int, pp: int) -> None:
    model = known(LLAMA_8B)
    for stage in range(pp):
        layout = Layout(Parallel(tp=tp, pp=pp), "bfloat16", quant)
        assert planned(model.family, model.facts, layout, stage) == written(model.family, model.facts, layout, stage)


@pytest.mark.parametrize("quant", [name for name in WRITTEN if expert_format(name)])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 2), (8, 8)])
def test_experts_are_shared_as_conversion_shares_them(quant: QuantFormat, tp: int, ep: int) -> None:
    model = known(MIXTRAL)
    layout = Layout(Parallel(tp=tp, ep=ep), "bfloat16", quant)
    assert planned(model.family, model.facts, layout, 0) == written(model.family, model.facts, layout, 0)


def test_every_family() -> None:
    from tests.families import TINY

    seen = set()
    for name, make in TINY.items():
        assert isinstance(make, partial)
        values: dict[str, Any] = {key: value for key, value in make.keywords.items() if key != "attention"}
        kind = make.args[0]
        config = HfConfig(kind(**values).to_dict() | {"architectures": [architecture_of(name)]}, Path("config.json"))
        family = family_of(config.architecture)
        facts = family.facts(config)
        seen.add(family.name)
        for tp, pp in ((1, 1), (2, 2), (1, 4)):
            for stage in range(pp):
                layout = Layout(Parallel(tp=tp, pp=pp), "bfloat16")
                expected = written(family, facts, layout, stage)
                assert planned(family, facts, layout, stage) == expected, f"{name} tp {tp} pp {pp}"
    families = [family_of(name) for name in architectures()]
    assert seen == {family.name for family in families if not family.nested}, "nested ones convert as their text models"


def architecture_of(name: str) -> str:
    """The architecture whose family's name the tiny model's begins with."""
    by_family = {family_of(architecture).name: architecture for architecture in architectures()}
    return by_family[max((family for family in by_family if name.startswith(family)), key=len)]
