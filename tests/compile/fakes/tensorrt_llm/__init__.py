"""Stands in for TensorRT-LLM: the signatures that 0.17 to 1.2 have in common, and a strict reading of configurations.

It behaves as `behaviour.json` beside it says (see tests/compile/trtllm.py) and records what is called in `calls.jsonl`.
"""
