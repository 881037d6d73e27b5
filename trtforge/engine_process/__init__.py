"""An engine in a separate process, shared by several model processes over a Unix domain socket.

Contains requests, frames, status, admission, server and client, but no engines. Needs no torch, so that it also runs
with TensorRT-LLM's LLM API.
"""
