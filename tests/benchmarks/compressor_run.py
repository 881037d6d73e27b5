"""`python -m tests.benchmarks.compressor_run REQUEST`: llm-compressor's GPTQ of a model, judged as `domains` judges.

Runs in an environment of its own (`make bench-peers`), because llm-compressor pins another `transformers`: it imports
nothing of trtforge. REQUEST: JSON of a `Request`; prints JSON: for each text, the increase of perplexity and the mean
KL divergence from float32. The package's defaults hold, among them static act-order.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.divergence import compared

FORMATS = ("int4", "nvfp4")


@dataclass(frozen=True)
class Request:
    """A model, token windows to calibrate on, and texts of token windows; `group`: of int4, 0 for whole rows."""

    model: str
    format: str
    group: int
    calibration: list[list[int]]
    judged: list[list[list[int]]]


def main() -> None:
    """Quantise and judge."""
    import torch
    from transformers import AutoModelForCausalLM

    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    load = AutoModelForCausalLM.from_pretrained
    reference = load(request.model, dtype=torch.float32).eval()
    model = _quantised(load(request.model, dtype=torch.float32).eval(), request)
    with torch.no_grad():
        found = [asdict(compared(model, reference, windows)) for windows in request.judged]
    print(json.dumps(found))


def _quantised(model, request):  # type: ignore[no-untyped-def]
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    left = {"ignore": ["lm_head", "embed_out"]}
    if request.format == "nvfp4":
        recipe = GPTQModifier(targets="Linear", scheme="NVFP4", **left)
    else:
        strategy = QuantizationStrategy.GROUP if request.group else QuantizationStrategy.CHANNEL
        weights = QuantizationArgs(num_bits=4, symmetric=True, strategy=strategy, group_size=request.group or None)
        recipe = GPTQModifier(config_groups={"all": QuantizationScheme(targets=["Linear"], weights=weights)}, **left)
    ids = request.calibration
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(window) for window in ids]})
    return oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
        pipeline="sequential",
        log_dir=None,
    )


if __name__ == "__main__":
    main()
