"""Gates and the figures they look at."""

import math

import pytest
import torch

from trtforge.core.recipe import GateConfig
from trtforge.verify.comparison import Comparison
from trtforge.verify.result import Divergence, Interval, Perplexity, Verification, failures


def test_equal_models_agree_completely() -> None:
    logits, ids = torch.randn(9, 20, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    found = Comparison()
    found.add(logits, logits, ids)
    assert found.tokens == 8
    assert found.reference_perplexity == found.candidate_perplexity
    assert (found.divergence, found.agreements, found.largest_error) == (0.0, 8, 0.0)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    found = Comparison()
    found.add(torch.zeros(5, 50), torch.zeros(5, 50), torch.tensor([1, 2, 3, 4, 5]))
    assert found.reference_perplexity == pytest.approx(50)


def test_divergence_is_that_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    reference, candidate = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    found = Comparison()
    found.add(reference, candidate, torch.tensor([0, 1, 2, 3]))
    p, q = reference[:-1].softmax(-1).double(), candidate[:-1].softmax(-1).double()
    assert found.divergence == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert found.largest_error == pytest.approx(float((reference - candidate)[:-1].abs().max()))


def test_windows_add_up() -> None:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(4, 6, generator=generator), torch.randn(7, 6, generator=generator)
    ids = torch.randint(0, 6, (7,), generator=generator)
    both = Comparison()
    both.add(first, first, ids[:4])
    both.add(second, second, ids)
    nll = [-logits[:-1].log_softmax(-1)[range(n - 1), ids[1:n]] for logits, n in ((first, 4), (second, 7))]
    assert both.reference_perplexity == pytest.approx(math.exp(float(torch.cat(nll).mean())), rel=1e-6)


@pytest.mark.parametrize(
    ("gate", "broken"),
    [
        ({}, []),
        ({"perplexity_increase": 0.02, "top1_agreement": 0.9, "kl_mean": 0.1}, []),
        ({"perplexity_increase": 0.01}, ["perplexity_increase"]),
        ({"top1_agreement": 0.96, "kl_mean": 0.01}, ["top1_agreement", "kl_mean"]),
        ({"kl_mean": 0.05, "kl_p99": 0.3}, []),
        ({"kl_mean": 0.05, "kl_p99": 0.29}, ["kl_p99"]),
    ],
)
def test_gate_names_what_does_not_hold(gate: dict[str, float], broken: list[str]) -> None:
    found = failures(
        GateConfig(**gate), perplexity_increase=0.015, top1_agreement=0.95, kl=Divergence(mean=0.05, p99=0.3)
    )
    assert [failure.figure for failure in found] == broken


def test_gate_does_not_hold_for_nan() -> None:
    nan = float("nan")
    found = failures(GateConfig(perplexity_increase=1.0, kl_mean=1.0), nan, 1.0, Divergence(mean=nan, p99=nan))
    assert [failure.figure for failure in found] == ["perplexity_increase", "kl_mean", "kl_p99"]


def test_json_is_the_contract() -> None:
    result = Verification(
        perplexity=Perplexity(reference=10.0, candidate=10.1, interval=Interval(low=0.005, high=0.015)),
        kl=Divergence(mean=0.1, p99=0.4),
        top1_agreement=0.9,
        max_abs_logit_error=1.0,
        tokens=5,
        tensors_checked=7,
    )
    values = result.as_json()
    assert values["passed"] is True
    perplexity = {"reference": 10.0, "candidate": 10.1, "increase": pytest.approx(0.01)}
    assert values["perplexity"] == perplexity | {"increase_interval": [0.005, 0.015]}
    assert (values["kl_mean"], values["kl_p99"], values["kl_p99_interval"]) == (0.1, 0.4, None)
    assert {"kl_mean", "top1_agreement", "max_abs_logit_error", "tokens", "tensors_checked"} <= set(values)


def test_nan_logits_are_seen_and_never_pass() -> None:
    logits = torch.zeros(4, 6)
    broken = logits.clone()
    broken[1, 2] = float("nan")
    found = Comparison()
    found.add(logits, logits, torch.tensor([0, 1, 2, 3]))
    found.add(logits, broken, torch.tensor([0, 1, 2, 3]))
    found.add(logits, logits, torch.tensor([0, 1, 2, 3]))
    assert math.isnan(found.largest_error)
    assert math.isnan(found.candidate_perplexity)
    assert math.isnan(found.divergences.mean)
    assert failures(GateConfig(), float("nan"), 1.0, Divergence(mean=0.0, p99=0.0))


def test_json_of_a_broken_model_is_json() -> None:
    import json

    nan = float("nan")
    result = Verification(
        perplexity=Perplexity(reference=10.0, candidate=nan),
        kl=Divergence(mean=nan, p99=nan),
        top1_agreement=0.0,
        max_abs_logit_error=nan,
        tokens=5,
        tensors_checked=7,
        failures=failures(GateConfig(), nan, 0.0, Divergence(mean=nan, p99=nan)),
    )
    values = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert values["passed"] is False
    assert values["perplexity"] == {"reference": 10.0, "candidate": None, "increase": None, "increase_interval": None}
