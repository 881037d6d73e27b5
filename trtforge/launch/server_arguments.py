"""Options of a repository's Triton servers: the one that listens, and those that only run ranks."""

import math
from dataclasses import dataclass
from pathlib import Path

from trtforge.engine_process.start import KV_STORE_BYTES_VARIABLE, KV_STORE_VARIABLE, TRACE_VARIABLE
from trtforge.formats.triton import RepositoryFacts
from trtforge.formats.triton_holes import has_option
from trtforge.launch.config import ServerConfig
from trtforge.launch.doors import door_arguments, new_secret

NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
"""For models whose code is read from the artifact itself, which must not change."""
_SPARE_THREADS = 32
_BODY_LIMIT = "http-max-input-size"
_BODY_BYTES = 8 * 1024 * 1024
_KEEPALIVE = ("--grpc-keepalive-time=30000", "--grpc-keepalive-timeout=10000")
"""Milliseconds: a client that vanished without closing is noticed after 40 s; Triton's default is 2 hours."""
_EXIT_MARGIN = 10  # seconds


@dataclass(frozen=True)
class Listening:
    """Triton's HTTP options and the secret that closes its doors. `direct`: clients reach Triton's own HTTP."""

    http: tuple[str, ...]
    secret: str
    direct: bool = True


def server_arguments(
    config: ServerConfig, facts: RepositoryFacts, repository: Path, prefix: str, listening: Listening
) -> tuple[str, ...]:
    """Options of the Triton server that listens. `prefix`: of its shared memory names."""
    return (
        f"--model-repository={repository}",
        *listening.http,
        f"--grpc-address={config.grpc_host}",
        f"--grpc-port={config.grpc_port}",
        *_KEEPALIVE,
        f"--metrics-address={config.host}",
        f"--metrics-port={config.metrics_port}",
        *door_arguments(config.open, listening.secret, http=listening.direct),
        *(("--allow-gpu-metrics=false",) if facts.device == "cpu" else ()),
        *_common_arguments(facts, prefix),
        # Later than the time when `trtforge serve` ends a slow server, so that Triton does not exit while unloading.
        f"--exit-timeout-secs={math.ceil(config.drain_timeout) + _EXIT_MARGIN}",
    )


def model_environment(config: ServerConfig) -> dict[str, str]:
    """Variables for the models: the address at which text models call an engine model that Triton itself runs."""
    traced = {} if config.trace is None else {TRACE_VARIABLE: str(config.trace.absolute())}
    stored = {}
    if config.kv_cache_dir is not None:
        directory, size = str(config.kv_cache_dir.absolute()), str(config.kv_cache_dir_bytes)
        stored = {KV_STORE_VARIABLE: directory, KV_STORE_BYTES_VARIABLE: size}
    return {"TRTFORGE_GRPC_URL": config.grpc_address, **traced, **stored}


def _common_arguments(facts: RepositoryFacts, prefix: str) -> tuple[str, ...]:
    """Options of every server of a repository.

    In repositories packaged by trtforge 0.1, a request that waits for its first token occupies a thread of the Python
    backend, which has 32 threads by default.
    """
    return (
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={prefix}_",
        f"--backend-config=python,thread-pool-size={facts.concurrency + _SPARE_THREADS}",
    )


def worker_arguments(facts: RepositoryFacts, repository: Path, prefix: str) -> tuple[str, ...]:
    """Options of a server that only runs a rank of the engine; clients do not reach it."""
    return (
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in facts.engine_models),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
        *_common_arguments(facts, prefix),
    )


def without_front(config: ServerConfig, triton: str | None) -> Listening:
    """Triton's own HTTP, with a limit on body size if its release is known to have that option."""
    limited = triton is not None and has_option(triton, _BODY_LIMIT)
    limit = (f"--{_BODY_LIMIT}={_BODY_BYTES}",) if limited else ()
    http = (f"--http-address={config.host}", f"--http-port={config.http_port}", *limit)
    return Listening(http, new_secret())
