"""How a repository is served: where it listens, how it is started and how long that may take."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trtforge.core.config_model import Config
from trtforge.serve.doors import Door

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
Launcher = Literal["auto", "local", "docker", "mpi"]
Restart = Literal["never", "on-failure"]


class ServeConfig(Config):
    """The options of `trtforge serve`."""

    http_port: int = Field(8000, ge=1, le=65535, description="HTTP port.")
    grpc_port: int = Field(8001, ge=1, le=65535, description="gRPC port.")
    metrics_port: int = Field(8002, ge=1, le=65535, description="Port of the Prometheus metrics.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    launcher: Launcher = Field(
        "auto", description="local: tritonserver here; docker: NVIDIA's image; mpi: a rank a GPU."
    )
    open: tuple[Door, ...] = Field((), description="Groups of endpoints that are closed unless named here.")
    api_key_file: Path | None = Field(None, description="API keys, one a line; clients of HTTP need one of them.")
    ready_timeout: float = Field(600.0, gt=0, description="Seconds until the first token must have been generated.")
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests have after SIGTERM.")
    restart: Restart = Field("never", description="on-failure: start a server that broke again, with backoff.")
    dry_run: bool = Field(False, description="Print command and environment, start nothing.")
    verbose: bool = Field(False, description="Show the server's log on stderr.")

    @property
    def ports(self) -> dict[str, int]:
        """The ports by what they are for."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    @property
    def reachable_host(self) -> str:
        """The address under which this machine reaches the server."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    @property
    def grpc_host(self) -> str:
        """The address for gRPC: loopback where API keys are asked for, because Triton cannot check them."""
        if self.api_key_file is None or self.host in _LOOPBACK:
            return self.host
        return "127.0.0.1"

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of gRPC as clients on this machine take it."""
        host = "127.0.0.1" if self.grpc_host in ("0.0.0.0", "::") else self.grpc_host
        return f"{host}:{self.grpc_port}"

    def address(self, port: int) -> str:
        """HOST:PORT as clients take it."""
        return f"{self.reachable_host}:{port}"
