"""OpenVINO GenAI's continuous batching, for `decode`. An interpreter of its own runs this file: it imports no trtforge.

`export MODEL OUT FORMAT` makes its model of a Hugging Face checkpoint with optimum-intel, FORMAT bfloat16, int8 or
int4 (symmetric, groups of 128); bfloat16 stores float16, which the CPU plugin multiplies as bfloat16 where it can.
`run MODEL CASES` prints JSON: seconds of every case in the file CASES, {"prompts": token ids of each request, "new":
tokens that each makes}. `make bench-peers` installs what it needs.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

WEIGHTS = {
    "bfloat16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}
CACHE_GB = 2


def export(model: str, out: str, format: str) -> None:
    """Convert a checkpoint."""
    program = str(Path(sys.executable).with_name("optimum-cli"))
    task = ("--task", "text-generation-with-past")
    subprocess.run([program, "export", "openvino", "-m", model, *task, *WEIGHTS[format], out], check=True)


def run(model: str, cases: str) -> list[float]:
    """Seconds from the first request to the last token of every case."""
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    seconds = []
    for case in json.loads(Path(cases).read_text()):
        start = time.perf_counter()
        handles = []
        for index, prompt in enumerate(case["prompts"]):
            config = genai.GenerationConfig(max_new_tokens=case["new"], ignore_eos=True, do_sample=False)
            handles.append(pipeline.add_request(index, ov.Tensor([prompt]), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        seconds.append(time.perf_counter() - start)
        for handle in handles:
            made = [len(output.generated_ids) for output in handle.read_all()]
            assert made == [case["new"]], made
    return seconds


if __name__ == "__main__":
    command, words = sys.argv[1], sys.argv[2:]
    if command == "export":
        export(*words)
    else:
        print(json.dumps(run(*words)))
