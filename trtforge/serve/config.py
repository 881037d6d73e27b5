"""How a repository is served: where it listens, how it is started and how long that may take."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from trtforge.core import defaults
from trtforge.core.config_model import Config
from trtforge.core.sizes import Bytes
from trtforge.serve.doors import Door

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
Launcher = Literal["auto", "local", "docker", "mpi", "orchestrator", "slurm", "trtllm-serve"]
ResolvedLauncher = Literal["local", "docker", "mpi", "orchestrator", "slurm", "trtllm-serve"]
"""A launcher after `auto` is resolved."""
Restart = Literal["never", "on-failure"]


class ServeConfig(Config):
    """The options of `trtforge serve`."""

    http_port: int = Field(defaults.HTTP_PORT, ge=1, le=65535, description="HTTP port.")
    grpc_port: int = Field(defaults.GRPC_PORT, ge=1, le=65535, description="gRPC port.")
    metrics_port: int = Field(defaults.METRICS_PORT, ge=1, le=65535, description="Port of the Prometheus metrics.")
    openai: bool = Field(True, description="Offer OpenAI's API too, if its packages are installed.")
    openai_port: int | None = Field(
        None, ge=1, le=65535, description="Port of OpenAI's API; default: a free one above the others."
    )
    host: str = Field(defaults.LOOPBACK, description="Address to listen on.")
    launcher: Launcher = Field(
        "auto",
        description="local: tritonserver on this machine; docker: NVIDIA's image; mpi: one rank per GPU; orchestrator: "
        "a server that starts its ranks; slurm: print a batch script; trtllm-serve: print the command of NVIDIA's "
        "OpenAI server for the LLM API.",
    )
    hosts: tuple[str, ...] = Field((), description="mpi: hosts that the ranks are divided over, this machine first.")
    nodes: int = Field(1, ge=1, description="slurm, trtllm-serve: nodes that the ranks are divided over.")
    open: tuple[Door, ...] = Field((), description="Endpoint groups to open; all are closed by default.")
    api_key_file: Path | None = Field(
        None, description="API keys, one per line, each of at least 16 characters; HTTP clients must send one."
    )
    ready_timeout: float = Field(
        defaults.READY_TIMEOUT, gt=0, description="Seconds allowed until the first token is generated."
    )
    drain_timeout: float = Field(
        defaults.DRAIN_TIMEOUT, ge=0, description="Seconds that running requests may take after SIGTERM."
    )
    restart: Restart = Field("never", description="on-failure: restart a failed server, with backoff.")
    trace: Path | None = Field(None, description="File for a trace of the embedded engine's iterations.")
    kv_cache_dir: Path | None = Field(None, description="Directory for KV blocks of the embedded engine.")
    kv_cache_dir_bytes: Bytes = Field(defaults.KV_CACHE_DIR_BYTES, description="Most bytes of these blocks.")
    dry_run: bool = Field(False, description="Print command and environment, start nothing.")
    verbose: bool = Field(False, description="Show the server's log on stderr.")

    @field_validator("hosts")
    @classmethod
    def _are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
                raise ValueError(f"{host!r} is not a host name")
        if len(set(hosts)) < len(hosts):
            raise ValueError("a host stands twice")
        return hosts

    @property
    def ports(self) -> dict[str, int]:
        """Port number by service."""
        openai = {} if self.openai_port is None else {"openai": self.openai_port}
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port} | openai

    @property
    def reachable_host(self) -> str:
        """The address under which this machine reaches the server."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    @property
    def grpc_host(self) -> str:
        """The address for gRPC: loopback if API keys are required, because Triton cannot check them."""
        if self.api_key_file is None or self.host in _LOOPBACK:
            return self.host
        return "127.0.0.1"

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of gRPC for clients on this machine."""
        host = "127.0.0.1" if self.grpc_host in ("0.0.0.0", "::") else self.grpc_host
        return f"{host}:{self.grpc_port}"

    def address(self, port: int) -> str:
        """HOST:PORT for clients on this machine."""
        return f"{self.reachable_host}:{port}"
