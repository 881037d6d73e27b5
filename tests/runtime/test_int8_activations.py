"""INT4 engines that round their activations to 8 bits, against a dense float32 model that rounds the same."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import LINEARS, Layout, dense_reference, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import computed
from trtforge.compile.stage import compile_engine
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.runtime.linears.int8 import round_by_group
from trtforge.runtime.linears.kernels import Kernels, choose_kernels
from trtforge.runtime.native.compiler import VARIABLE

GROUP = 32
_generator = torch.Generator().manual_seed(7)
SEQUENCES = [torch.randint(0, 131, (length,), generator=_generator).tolist() for length in (1, 3, 8, 9, 17, 60)]
ROUNDED = EngineConfig(backend="torch", device="cpu", int8_activations=True)


def logits(model: LlamaForCausalLM) -> list[Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0] for tokens in SEQUENCES]


def errors(made: list[Tensor], expected: list[Tensor]) -> Tensor:
    return torch.tensor([(a - b).norm() / b.norm() for a, b in zip(made, expected, strict=True)])


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_logits_are_those_of_the_dense_model(
    tmp_path: Path, tp: int, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a compiler is missing that there was when the engine was made."""
    if not compiler:
        monkeypatch.setenv(VARIABLE, "torch")
    model, layout = tiny_llama(), Layout(tp=tp, quant="W4A16_AWQ", group_size=GROUP)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", layout)
    reference = dense_reference(model, layout)
    exact = logits(reference)
    for layer in reference.model.layers:
        for module in [layer.get_submodule(source) for sources in LINEARS.values() for source in sources]:
            module.register_forward_pre_hook(lambda _, inputs: (round_by_group(inputs[0], GROUP),))
    expected = logits(reference)
    engine = write_engine(checkpoint, tmp_path / "engine", kernels=Kernels(quantized="int4_coded_cpu"))
    made = computed(engine, *SEQUENCES)
    found = errors(made, expected)
    # sums in another order round an activation otherwise now and then, which spoils the rest of its sequence
    assert found.median() < 3e-6
    assert found.max() < 0.1
    assert errors(made, exact).min() > 0.001  # the tolerance tells what was rounded
    assert errors(made, exact).max() < 0.1


@pytest.mark.parametrize("format", ["int4_awq", "int4_wo"])
def test_the_kernel_is_chosen_where_it_is_asked_for(format: str) -> None:
    for dtype in ("float32", "bfloat16"):
        chosen = choose_kernels(format, 128, "cpu", dtype, int8_activations=True)  # type: ignore[arg-type]
        assert chosen.quantized == "int4_coded_cpu"
        assert choose_kernels(format, 128, "cpu", dtype).quantized == "int4_native_cpu"  # type: ignore[arg-type]
    assert choose_kernels("fp8", 128, "cpu", "float32", int8_activations=True).quantized == "fp8_native_cpu"


def test_an_engine_records_it(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tiny_llama(), tmp_path / "checkpoint", Layout(quant="W4A16_AWQ", group_size=GROUP))
    engine = compile_engine(ROUNDED, checkpoint, tmp_path / "engine").path
    kernels = json.loads((engine / "config.json").read_text())["forge"]["kernels"]
    assert kernels["quantized"] == "int4_coded_cpu"


@pytest.mark.parametrize(
    ("quant", "changes", "said"),
    [
        (None, {}, "engine.int8_activations applies only to INT4 weights (int4_awq, int4_wo), not to none"),
        ("FP8", {}, "engine.int8_activations applies only to INT4 weights (int4_awq, int4_wo), not to fp8"),
        ("W4A16_AWQ", {"compute_dtype": "float16"}, "engine.int8_activations: needs a C++ compiler"),
    ],
)
def test_engines_that_cannot_are_refused(tmp_path: Path, quant: str | None, changes: dict[str, str], said: str) -> None:
    checkpoint = write_checkpoint(tiny_llama(), tmp_path / "checkpoint", Layout(quant=quant, group_size=GROUP))
    with pytest.raises(ForgeError) as caught:
        compile_engine(ROUNDED.model_copy(update=changes), checkpoint, tmp_path / "engine")
    assert caught.value.message.startswith(said)
    assert "leave it out" in (caught.value.hint or "").lower()
    assert not (tmp_path / "engine").exists()
