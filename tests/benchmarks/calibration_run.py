"""`python -m tests.benchmarks.calibration_run KIND MODEL IDS OUT BATCH`: one measured run, as JSON.

`seconds`; `rss`, the peak of the whole process in bytes; `passes`, for ModelOpt: the seconds of every batch of each
pass over the data. Imports and, for the peers, loading the model are outside of the time; ours reads the checkpoint
inside of it. KIND: fp8, int4_awq (rounded to the nearest, as by ModelOpt) or int4_awq_compensated; or forward,
modelopt_fp8 or modelopt_int4_awq, which compute in float32 unless _bfloat16 follows. BATCH: windows of a forward pass.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.calibration import OURS
from trtforge.machine.usage import peak_memory


def main() -> None:
    """Run and print."""
    kind, model, ids, out, batch = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
    passes: list[list[float]] = []
    ours = kind in OURS
    run = _ours(kind, model, ids, out, int(batch)) if ours else _peer(kind, model, ids, int(batch), passes)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "rss": peak_memory(), "passes": passes}))


def _ours(kind: str, model: Path, ids: Path, out: Path, batch: int) -> Callable[[], object]:
    import torch  # noqa: F401
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import trtforge.calibrate.memory
    import trtforge.calibrate.walk  # noqa: F401
    from trtforge.calibrate.stage import CalibrateConfig, calibrate
    from trtforge.core.recipe import CalibrationConfig

    with safe_open(ids, "pt") as file:
        _, window = file.get_slice("input_ids").get_shape()
    data = CalibrationConfig(data=str(ids), samples=10**6, sequence_length=window, batch_size=batch)
    quant, compensated = kind.removesuffix("_compensated"), kind.endswith("_compensated")
    rounding = "compensated" if compensated else "nearest"
    config = CalibrateConfig.model_validate({"format": quant, "rounding": rounding, "data": data})
    return lambda: calibrate(config, model, out, force=True)


def _peer(kind: str, model: Path, ids: Path, batch: int, passes: list[list[float]]) -> Callable[[], object]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if kind.endswith("_bfloat16") else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    batches = load_file(ids)["input_ids"].split(batch)

    def forward(module: torch.nn.Module) -> None:
        passes.append([])
        for part in batches:
            start = time.perf_counter()
            module(input_ids=part)
            passes[-1].append(time.perf_counter() - start)

    kind = kind.removesuffix("_bfloat16")
    if kind == "forward":
        return lambda: forward(loaded)
    import modelopt.torch.quantization as mtq

    chosen = {"modelopt_fp8": mtq.FP8_DEFAULT_CFG, "modelopt_int4_awq": mtq.INT4_AWQ_CFG}[kind]
    return lambda: mtq.quantize(loaded, chosen, forward)


if __name__ == "__main__":
    main()
