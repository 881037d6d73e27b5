"""Memory of the work before serving."""

import pytest

from tests.plan.models import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL, asked, known
from trtforge.plan.model import Model
from trtforge.plan.peaks import CALIBRATION_BYTES, LAYER_COPIES, quantise_peak, shared_memory
from trtforge.plan.planner import Plan, plan


def test_quantising_a_whole_model_takes_one_and_a_half_times_its_size() -> None:
    """TensorRT-LLM issue 1331: 140 GB of the 70B model and 70 GB of its FP8 copy."""
    assert quantise_peak(140_000_000_000, 8) == 210_000_000_000
    model = known(LLAMA_70B)
    peaks = plan(model, asked(model, quant="fp8"), "throughput").peaks
    assert peaks.quantise_at_once_gpu is not None
    assert peaks.quantise_at_once_gpu >= 1.5 * 141.1e9


def test_layer_by_layer_takes_a_fraction() -> None:
    model = known(LLAMA_70B)
    for quant, rounding, share in (("fp8", "auto", 0.1), ("int4_awq", "nearest", 0.1), ("int4_awq", "auto", 0.2)):
        recipe = {"quantization": {"format": quant, "rounding": rounding}}
        peaks = plan(model, asked(model, recipe=recipe), "throughput").peaks
        assert peaks.calibration_gpu is not None
        assert peaks.quantise_at_once_gpu is not None
        assert peaks.calibration_gpu < share * peaks.quantise_at_once_gpu


def calibration_of(model: Model, quant: str, rounding: str = "auto") -> int:
    recipe = {"quantization": {"format": quant, "rounding": rounding}}
    found = plan(model, asked(model, recipe=recipe), "throughput").peaks.calibration_gpu
    assert found is not None
    return found


def test_the_awq_search_needs_sketches_of_the_inputs() -> None:
    model = known(LLAMA_8B)
    sketches = 4 * 2039 * (3 * 4096 + 14336)
    more = calibration_of(model, "int4_awq", "nearest") - calibration_of(model, "fp8")
    assert more == sketches + 3 * 4 * 4096 * 14336


def test_compensated_rounding_needs_gram_matrices_of_the_inputs() -> None:
    """One of each input, two more of the largest, and two copies of the largest weight."""
    model = known(LLAMA_8B)
    floats = 3 * 4096**2 + 14336**2 + 2 * (14336**2 + 4096 * 14336)
    more = calibration_of(model, "int4_awq") - calibration_of(model, "fp8")
    assert more == 4 * floats + 3 * 4 * 4096 * 14336


def limited(memory: int | None) -> Plan:
    model = known(LLAMA_8B)
    recipe = {"quantization": {"format": "fp8", "memory": memory, "calibration": {"samples": 512}}}
    return plan(model, asked(model, recipe=recipe), "throughput")


def test_calibration_stays_under_the_recipes_limit() -> None:
    """As `hidden_budget` of the calibration: what the limit leaves beside one layer's work holds hidden states."""
    hidden, free = 512 * 512 * 4096 * 2, limited(None).peaks.calibration_gpu
    layer = 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    needed = LAYER_COPIES * layer + CALIBRATION_BYTES
    assert free is not None
    assert limited(needed + hidden).peaks.calibration_gpu == free
    assert limited(needed + hidden // 4).peaks.calibration_gpu == free - hidden + hidden // 4
    assert limited(needed).peaks.calibration_gpu == free - hidden


def test_a_limit_that_no_calibration_keeps_is_refused() -> None:
    found = limited(10**9)
    (fix,) = found.fixes
    assert fix.problem.rule == "calibration"
    needs = "one layer at a time needs 1,442,889,728 plus the program itself"
    assert fix.problem.message == f"calibration memory of 1,000,000,000 bytes is too small: {needs}"
    assert fix.text == "Use --set quantization.memory=2042889728."
    assert limited(1_442_889_728).evaluation.legal
    model = known(LLAMA_8B)
    weight_only = asked(model, recipe={"quantization": {"format": "int8_wo", "memory": 10**9}})
    assert plan(model, weight_only, "throughput").evaluation.legal


def test_without_quantisation_nothing_is_calibrated() -> None:
    model = known(LLAMA_8B)
    peaks = plan(model, asked(model), "throughput").peaks
    assert peaks.calibration_gpu is None
    assert peaks.quantise_at_once_gpu is None
    assert peaks.build_host_per_worker == pytest.approx(2 * 16.06e9, rel=0.01)


def test_every_expert_has_its_own_sketches() -> None:
    model = known(MIXTRAL)
    attention, experts = 2 * 4096, 8 * (4096 + 14336)
    largest = 2 * 14336 * 4096  # gate and up of one expert
    more = calibration_of(model, "int4_awq", "nearest") - calibration_of(model, "fp8")
    assert more == 4 * (2039 * (attention + experts) + 3 * largest)


def test_verification_holds_a_layer_of_two_models_in_float32() -> None:
    model = known(LLAMA_405B)
    layer = 16384 * (2 * 16384 + 2 * 1024 + 3 * 53248) + 2 * 16384
    states = 2 * 4 * 32 * 256 * 16384
    for quant in ("none", "fp8"):
        peaks = plan(model, asked(model, quant=quant), "throughput").peaks
        assert peaks.verify_host == 600_000_000 + states + 3 * 4 * layer


def test_verification_of_a_large_vocabulary_holds_its_heads() -> None:
    model = known("google/gemma-2-9b-it")
    gate = {"samples": 8, "sequence_length": 512}
    peaks = plan(model, asked(model, recipe={"gate": gate}), "throughput").peaks
    table, logits = 4 * (256_000 * 3584 + 3584), 4 * 512 * 256_000
    assert peaks.verify_host == 600_000_000 + 2 * 4 * 8 * 512 * 3584 + int(2.5 * table) + 6 * logits


def test_every_python_model_takes_64_mib_of_shared_memory() -> None:
    """Triton server issue 6195: two instances need 128 MiB, 127 are too few."""
    assert shared_memory(2) == 128 << 20
