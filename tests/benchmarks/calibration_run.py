"""`python -m tests.benchmarks.calibration_run KIND MODEL IDS OUT`: one measured run, as JSON {seconds, rss}.

Imports and, for the peers, loading the model are outside of the time; ours reads the checkpoint inside of it. `rss` is
the peak of the whole process in bytes. KIND: forward, fp8, int4_awq, modelopt_fp8 or modelopt_int4_awq.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trtforge.core.usage import peak_memory

BATCH = 8


def main() -> None:
    """Run and print."""
    kind, model, ids, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    run = _ours(kind, model, ids, out) if kind in ("fp8", "int4_awq") else _peer(kind, model, ids)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "rss": peak_memory()}))


def _ours(kind: str, model: Path, ids: Path, out: Path) -> Callable[[], object]:
    import torch  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    import trtforge.calibrate.memory
    import trtforge.calibrate.walk  # noqa: F401
    from trtforge.calibrate.stage import CalibrateConfig, calibrate
    from trtforge.core.recipe import CalibrationConfig

    data = CalibrationConfig(data=str(ids), samples=10**6, sequence_length=512, batch_size=BATCH)
    config = CalibrateConfig.model_validate({"format": kind, "data": data})
    return lambda: calibrate(config, model, out, force=True)


def _peer(kind: str, model: Path, ids: Path) -> Callable[[], object]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    batches = load_file(ids)["input_ids"].split(BATCH)

    def forward(module: torch.nn.Module) -> None:
        for batch in batches:
            module(input_ids=batch)

    if kind == "forward":
        return lambda: forward(loaded)
    import modelopt.torch.quantization as mtq

    chosen = {"modelopt_fp8": mtq.FP8_DEFAULT_CFG, "modelopt_int4_awq": mtq.INT4_AWQ_CFG}[kind]
    return lambda: mtq.quantize(loaded, chosen, forward)


if __name__ == "__main__":
    main()
