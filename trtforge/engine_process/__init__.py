"""An engine in a process of its own, shared by several model processes over a Unix domain socket.

Requests, frames, status, admission, server and client. Needs no torch, so that it also runs beside TensorRT-LLM's LLM
API. The engines themselves are elsewhere.
"""
