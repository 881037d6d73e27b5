"""Layouts that cannot be are refused with a legal choice, which itself passes."""

from dataclasses import replace
from pathlib import Path

import pytest

from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.formats.hf import HfConfig
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.families.llama import FAMILY
from trtforge.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from trtforge.models.family import Facts
from trtforge.plan.legality import Problem, legal_tp, problems, require_legal


def facts(**changes: object) -> Facts:
    llama_2_7b = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    }
    return FAMILY.facts(HfConfig(llama_2_7b | changes, Path("config.json")))


def rules(model: Facts, quant: str = "none", group: int = 128, **parallel: int) -> list[str]:
    return [p.rule for p in problems(FAMILY, model, Layout(Parallel(**parallel), "float16", quant, group_size=group))]


# (inputs per rank) % group == 0, as TensorRT-LLM's users found out: issues 1636, 729, 2445, lmdeploy 1560.
@pytest.mark.parametrize(
    ("intermediate", "tp", "legal_128", "legal_64"),
    [
        (11008, 4, False, True),
        (11008, 8, False, False),
        (13824, 4, True, True),
        (13824, 8, False, True),
        (29568, 4, False, False),
        (13696, 2, False, True),
        (27392, 4, False, True),
    ],
)
def test_awq_group_must_divide_the_inputs_of_a_rank(
    intermediate: int, tp: int, legal_128: bool, legal_64: bool
) -> None:
    model = facts(intermediate_size=intermediate)
    assert (rules(model, "int4_awq", 128, tp=tp) == []) is legal_128
    assert (rules(model, "int4_awq", 64, tp=tp) == []) is legal_64
    assert rules(model, "fp8", tp=tp) == []


def test_awq_fix_is_legal() -> None:
    problem = problems(FAMILY, facts(), Layout(Parallel(tp=4), "float16", "int4_awq"))[0]
    assert problem.rule == "awq_group"
    assert "--tp 2" in problem.fix
    assert "group size 64 (`trtforge calibrate --group-size 64`)" in problem.fix
    assert rules(facts(), "int4_awq", 128, tp=2) == []


@pytest.mark.parametrize(
    ("intermediate", "tp", "legal"), [(11008, 2, True), (11009, 1, False), (11010, 2, False), (11010, 1, True)]
)
def test_weight_only_int4_packs_pairs_of_outputs(intermediate: int, tp: int, legal: bool) -> None:
    model = facts(intermediate_size=intermediate)
    assert rules(model, "int4_wo", tp=tp) == ([] if legal else ["int4_pairs"] * 2)  # gate and up
    assert rules(model, "int8_wo", tp=tp) == []


@pytest.mark.parametrize(
    ("changes", "parallel", "rule"),
    [
        ({"num_attention_heads": 28, "hidden_size": 3584, "num_key_value_heads": 4}, {"tp": 8}, "heads"),
        ({"num_key_value_heads": 6}, {"tp": 4}, "kv_heads"),
        ({}, {"pp": 3}, "layers"),
        ({}, {"tp": 2, "ep": 2}, "experts"),
        ({"intermediate_size": 11009}, {"tp": 2}, "columns"),
    ],
)
def test_broken_rule_is_named(changes: dict[str, int], parallel: dict[str, int], rule: str) -> None:
    assert rule in rules(facts(**changes), **parallel)


def test_kv_heads_are_repeated_over_more_ranks() -> None:
    assert rules(facts(num_key_value_heads=2), tp=8) == []


def test_error_carries_the_fix() -> None:
    with pytest.raises(ForgeError, match="32 layers cannot be split over pp 5") as caught:
        require_legal(FAMILY, facts(), Layout(Parallel(pp=5), "float16"))
    assert caught.value.hint == "Choose a --pp that divides 32: 1, 2, 4, 8, 16, 32."


@pytest.mark.parametrize(("tp", "ep"), [(2, 4), (3, 2)])
def test_ep_must_divide_tp(tp: int, ep: int) -> None:
    with pytest.raises(ForgeError, match=f"ep {ep} does not divide tp {tp}"):
        Parallel(tp=tp, ep=ep)


def test_groups_and_pairs_inside_an_expert_are_not_cut() -> None:
    """Qwen3-30B-A3B: 768 inner units an expert are 96 a rank at tp 8, and whole where experts are spread instead."""
    config = {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    model = QWEN3_MOE.facts(HfConfig(config, Path("config.json")))

    def found(tp: int, ep: int) -> list[Problem]:
        return list(problems(QWEN3_MOE, model, Layout(Parallel(tp=tp, ep=ep), "bfloat16", "int4_awq")))

    odd = QWEN3_MOE.facts(HfConfig(config | {"moe_intermediate_size": 33}, Path("config.json")))
    pairs = Layout(Parallel(), "bfloat16", "int4_wo", compensated=True)
    assert {each.rule for each in problems(QWEN3_MOE, odd, pairs)} == {"int4_pairs"}
    assert problems(QWEN3_MOE, odd, replace(pairs, compensated=False)) == ()
    (problem,) = found(8, 1)
    assert problem.rule == "awq_group"
    assert "mlp.experts.0.down_proj: 96 inputs a rank at tp 8 and ep 1" in problem.message
    assert found(8, 8) == []
    assert found(2, 1) == []


def test_a_refusal_names_only_tensor_parallelism_that_is_legal_as_a_whole() -> None:
    """28 heads divide by 7 too, but neither their 4 KV heads nor the groups of 128 do."""
    model = facts(
        hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=28
    )
    layout = Layout(Parallel(tp=8), "float16", "int4_awq")
    assert legal_tp(FAMILY, model, layout) == [1, 2, 4]
    with pytest.raises(ForgeError, match="28 attention heads cannot be split over tp 8") as caught:
        require_legal(FAMILY, model, layout)
    assert caught.value.hint == "Choose --tp from 1, 2, 4."
    assert caught.value.repair is not None
    assert caught.value.repair.options == (("--tp", "4"),)
    with pytest.raises(ForgeError, match="KV heads can neither be split over nor replicated on tp 7") as caught:
        require_legal(FAMILY, model, Layout(Parallel(tp=7), "float16"))
    assert caught.value.hint == "Choose --tp from 1, 2, 4."
