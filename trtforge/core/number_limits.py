"""Largest magnitudes and block sizes of the quantised number formats, defined here only."""

FP8_MAX = 448.0
"""Largest finite magnitude of float8 E4M3."""

INT8_MAX = 127.0
"""Largest magnitude of symmetric INT8 quantisation."""

E2M1_MAX = 6.0
"""Largest magnitude of float4 E2M1, the element type of NVFP4 and MXFP4."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1's codes."""

NVFP4_BLOCK = 16
"""Inputs that share a block scale in NVFP4."""
