"""Output tokens/s that NVIDIA publishes for TensorRT-LLM 1.0, under maximum load.

Source: NVIDIA/TensorRT-LLM docs/source/performance/perf-overview.md (1.0): weights FP8 or NVFP4, KV cache FP8.
"""

from dataclasses import dataclass

LENGTHS = (
    (128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (1000, 2000), (2048, 128), (2048, 2048),
    (5000, 500), (20000, 2000),
)  # fmt: skip
"""Tokens of prompt and answer, in the order of each row."""

REQUESTS = (30000, 3000, 1500, 3000, 3000, 1500, 3000, 1500, 1500, 1000)
"""Requests that each length was measured with."""


@dataclass(frozen=True)
class Row:
    """One deployment, and its tokens/s at each of LENGTHS."""

    model: str
    gpu: str
    tp: int
    pp: int
    quant: str
    tokens_per_second: tuple[int, ...]


_8B, _70B, _405B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-405B"
PUBLISHED = (
    Row(_8B, "h100-80gb", 1, 1, "fp8", (28312, 22714, 14325, 17660, 15220, 13899, 3450, 9305, 3459, 1351)),
    Row(_8B, "h200", 1, 1, "fp8", (27911, 26221, 18027, 20770, 17744, 16828, 3538, 12194, 3902, 1804)),
    Row(_70B, "h100-80gb", 2, 1, "fp8", (6378, 6651, 4199, 5222, 4205, 4146, 762, 3082, 898, 437)),
    Row(_70B, "h200", 1, 1, "fp8", (3803, 4336, 2872, 3666, 2909, 2994, 442, 2003, 566, 283)),
    Row(_70B, "b200", 1, 1, "nvfp4", (11147, 9922, 6831, 7762, 7007, 6271, 1339, 4783, 1459, 665)),
    Row(_70B, "rtx-pro-6000", 1, 1, "nvfp4", (3264, 2422, 1349, 1856, 1787, 1594, 393, 1074, 401, 142)),
    Row(_70B, "rtx-pro-6000", 1, 2, "nvfp4", (6172, 4993, 2893, 4114, 3707, 2993, 813, 2336, 812, 319)),
    Row(_70B, "rtx-pro-6000", 1, 4, "nvfp4", (9641, 7922, 4978, 6939, 5961, 5274, 1511, 3870, 1511, 630)),
    Row(_70B, "rtx-pro-6000", 1, 8, "nvfp4", (11881, 9833, 7352, 9435, 8166, 6943, 2495, 6078, 2491, 1148)),
    Row(_405B, "h100-80gb", 8, 1, "fp8", (3627, 4340, 3116, 3994, 2919, 2895, 453, 2296, 610, 345)),
    Row(_405B, "h200", 8, 1, "fp8", (3814, 5348, 4741, 4724, 3330, 3722, 456, 2948, 650, 505)),
    Row(_405B, "b200", 4, 1, "nvfp4", (6281, 8020, 6345, 6244, 5209, 4933, 749, 4212, 1048, 672)),
)
