"""The addresses of a repository's Triton server, the hosts of its ranks and its drain timeout."""

import re
from pathlib import Path

from pydantic import Field, field_validator

from trtforge.core import defaults
from trtforge.core.config_model import Config
from trtforge.core.host_check import AllowedHost, is_loopback
from trtforge.core.sizes import Bytes
from trtforge.launch.doors import Door


class ServerConfig(Config):
    """The settings of a server's command line."""

    http_port: int = Field(defaults.HTTP_PORT, ge=0, le=65535, description="HTTP port.")
    grpc_port: int = Field(defaults.GRPC_PORT, ge=0, le=65535, description="gRPC port.")
    metrics_port: int = Field(defaults.METRICS_PORT, ge=0, le=65535, description="Port of the Prometheus metrics.")
    host: str = Field(defaults.LOOPBACK, description="Address to listen on.")
    hosts: tuple[str, ...] = Field((), description="mpi: hosts that the ranks are divided over, this machine first.")
    nodes: int = Field(1, ge=1, description="slurm, trtllm-serve: nodes that the ranks are divided over.")
    open: tuple[Door, ...] = Field((), description="Endpoint groups to open; all are closed by default.")
    api_key_file: Path | None = Field(
        None, description="API keys, one per line, each of at least 16 characters; HTTP clients must send one."
    )
    allowed_hosts: tuple[AllowedHost, ...] = Field(
        (), description="Host names besides localhost for HTTP clients of a server on loopback without API keys."
    )
    drain_timeout: float = Field(
        defaults.DRAIN_TIMEOUT, ge=0, description="Seconds that running requests may take after SIGTERM."
    )
    trace: Path | None = Field(None, description="File for a trace of the embedded engine's iterations.")
    kv_cache_dir: Path | None = Field(None, description="Directory for KV blocks of the embedded engine.")
    kv_cache_dir_bytes: Bytes = Field(defaults.KV_CACHE_DIR_BYTES, description="Maximum size of these blocks in bytes.")

    @field_validator("hosts")
    @classmethod
    def _are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
                raise ValueError(f"{host!r} is not a host name")
        if len(set(hosts)) < len(hosts):
            raise ValueError("a host is listed twice")
        return hosts

    @property
    def grpc_host(self) -> str:
        """The address for gRPC: loopback if API keys are required, because Triton cannot check them."""
        if self.api_key_file is None or is_loopback(self.host):
            return self.host
        return "127.0.0.1"

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of gRPC for clients on this machine."""
        host = "127.0.0.1" if self.grpc_host in ("0.0.0.0", "::") else self.grpc_host
        return f"{host}:{self.grpc_port}"
