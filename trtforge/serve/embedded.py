"""Whether an engine of the embedded runtime runs on this machine: its device, its kernels, its compute type."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.core.device import BFLOAT16_SM
from trtforge.core.errors import ForgeError
from trtforge.engine_process.start import trace_of
from trtforge.formats.triton import RepositoryFacts
from trtforge.formats.trtllm import read_engine_config
from trtforge.machine.compiler import find_compiler
from trtforge.machine.host import Host
from trtforge.machine.nvml import VISIBLE_DEVICES, LoadNvml, load_nvml
from trtforge.models.kernels import CUDA_KERNELS, FP8_SM, TRITON_SM
from trtforge.runtime.native.compiler import compile_ahead
from trtforge.serve.host_checks import visible_gpus

_LOG = logging.getLogger(__name__)
_AGAIN = "compile the checkpoint again on this machine (`trtforge compile CHECKPOINT OUT --backend torch`)"
_LEAST_SM: Mapping[str, int] = {"fp8_scaled_mm": FP8_SM} | dict.fromkeys(CUDA_KERNELS, TRITON_SM)
"""Lowest compute capability x 10 of kernels."""


def check_trace(facts: RepositoryFacts, trace: Path | None) -> None:
    """Raises ForgeError if a trace is requested but the engine writes none or its file cannot be written."""
    if trace is None:
        return
    if facts.backend != "torch":
        raise ForgeError(
            f"--trace: an engine of backend {facts.backend} writes no trace",
            hint="Use NVIDIA's Nsight Systems, or serve an engine of backend torch.",
        )
    if not trace.absolute().parent.is_dir():
        raise ForgeError(f"--trace {trace}: its directory does not exist", hint="Name a file in one that does.")


def remove_trace(facts: RepositoryFacts, trace: Path | None) -> None:
    """Remove the traces of an earlier server's engines; a restarted engine writes its trace beside its first one."""
    if trace is None:
        return
    for path in {trace, trace_of(trace, facts.draft_model)}:
        if path.is_file():
            path.unlink()


def check_kv_cache_dir(facts: RepositoryFacts, directory: Path | None) -> None:
    """Raises ForgeError if a directory for KV blocks is given but the engine stores none."""
    if directory is not None and facts.backend != "torch":
        raise ForgeError(
            f"--kv-cache-dir: an engine of backend {facts.backend} stores no KV blocks in files",
            hint="Set serving.kv_cache_host_memory_bytes in its recipe, or serve an engine of backend torch.",
        )
    if directory is not None and directory.exists() and not directory.is_dir():
        raise ForgeError(f"--kv-cache-dir {directory}: it is not a directory", hint="Name one; it may be new.")


def check_embedded(facts: RepositoryFacts, repository: Path, load: LoadNvml = load_nvml) -> None:
    """Raises ForgeError if the embedded engine of `repository` cannot run here.

    Logs a warning if the GPU has no bfloat16 arithmetic and emulates it in float32, and if a CPU's kernels cannot be
    compiled.
    """
    if facts.backend != "torch":
        return
    _, values = read_engine_config(repository / facts.model("tensorrt_llm") / "1" / facts.engine_path)
    forge = _object(values, "forge")
    kernels = _object(forge, "kernels")
    if facts.device == "cpu":
        _check_cpu(kernels)
        if find_compiler(Host()) is None:
            _LOG.warning(
                "there is no C++ compiler here: the engine computes with torch's slower kernels. Install g++ (Debian: "
                "`apt-get install g++`)"
            )
        return
    gpus = visible_gpus(load, os.environ.get(VISIBLE_DEVICES))
    if gpus == ():
        raise ForgeError(
            "the engine was compiled for device cuda, this machine has no visible GPU",
            hint=f"Serve it on a machine with a GPU, or {_AGAIN}.",
        )
    gpu = gpus[0] if gpus else None
    if gpu is None or gpu.sm is None:
        return
    names = (str(kernels.get(part)) for part in ("quantized", "fp8"))
    lacking = next((name for name in names if gpu.sm < _LEAST_SM.get(name, 0)), None)
    if lacking is not None:
        raise ForgeError(
            f"the engine was compiled with the kernel {lacking}, which needs SM {_LEAST_SM[lacking]}; "
            f"this machine's {gpu.name} has SM {gpu.sm}",
            hint=f"Serve it on a newer GPU, or {_AGAIN}.",
        )
    if forge.get("compute_dtype") == "bfloat16" and gpu.sm < BFLOAT16_SM:
        _LOG.warning(
            f"the engine computes in bfloat16, {gpu.name} (SM {gpu.sm}) only emulates it: {_AGAIN} with "
            "--compute-dtype float16"
        )


def compile_kernels(facts: RepositoryFacts) -> None:
    """Compile the CPU kernels of an embedded engine, unless they exist, so that its process starts faster."""
    if facts.backend == "torch" and facts.device == "cpu":
        compile_ahead()


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise ForgeError(
            f"config.json of the engine: {key} is {found!r:.60}, not an object", hint=f"To fix it, {_AGAIN}."
        )
    return found


def _check_cpu(kernels: Mapping[str, Any]) -> None:
    """Check weights that are packed for one CPU instruction set; only then is torch imported."""
    if kernels.get("cpu_capability") is None and kernels.get("quantized") != "int8_sq_cpu":
        return
    from trtforge.runtime.linears.kernels import Kernels

    Kernels.parse(kernels, "config.json: forge.kernels").check()
