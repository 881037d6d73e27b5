"""The arithmetic of FP8 with block scales: bfloat16(float32(code) x scale).

The same as in DeepSeek-V3's inference/kernel.py (`weight_dequant`) and `transformers` (integrations/finegrained_fp8.py,
`Fp8Dequantize`, 5.23); blocks at the edges of a matrix may be smaller.
"""

import torch


def dequantize(
    codes: memoryview, scales: memoryview, rows: range, columns: int, scale_dtype: str, block: tuple[int, int]
) -> memoryview:
    """The bytes of some bfloat16 `rows` of a matrix, from their E4M3 codes and all scales of the blocks they touch."""
    high, wide = block
    weight = torch.frombuffer(codes, dtype=torch.float8_e4m3fn).view(len(rows), columns).float()
    factors = torch.frombuffer(scales, dtype=getattr(torch, scale_dtype)).view(-1, -(-columns // wide)).float()
    for number, factor in enumerate(factors, start=rows.start // high):
        of_block = slice(max(number * high - rows.start, 0), (number + 1) * high - rows.start)
        weight[of_block] *= factor.repeat_interleave(wide)[:columns]
    return weight.bfloat16().view(torch.uint8).flatten().numpy().data
