"""An engine in a process of its own, shared by several model processes over a Unix domain socket.

This package is what both ends agree on: requests, frames, admission and status. It needs the standard library only, so
that it runs beside TensorRT-LLM's LLM API as well. The engines themselves are elsewhere.
"""
