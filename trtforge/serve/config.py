"""How a repository is served: how its server is started and how long that may take."""

from typing import Literal

from pydantic import Field

from trtforge.core import defaults
from trtforge.core.reasoning import ReasoningParser
from trtforge.launch.config import ServerConfig

Launcher = Literal["auto", "local", "docker", "mpi", "orchestrator", "slurm", "trtllm-serve"]
ResolvedLauncher = Literal["local", "docker", "mpi", "orchestrator", "slurm", "trtllm-serve"]
"""A launcher after `auto` is resolved."""
Restart = Literal["never", "on-failure"]


class ServeConfig(ServerConfig):
    """The options of `trtforge serve`."""

    openai: bool = Field(True, description="Offer OpenAI's API too, if its packages are installed.")
    openai_port: int | None = Field(
        None, ge=0, le=65535, description="Port of OpenAI's API; default: a free one above the others."
    )
    reasoning_parser: ReasoningParser | None = Field(
        None, description="Form of the reasoning that OpenAI's API returns apart from the answer."
    )
    launcher: Launcher = Field(
        "auto",
        description="local: tritonserver on this machine; docker: NVIDIA's image; mpi: one rank per GPU; orchestrator: "
        "a server that starts its ranks; slurm: print a batch script; trtllm-serve: print the command of NVIDIA's "
        "OpenAI server for the LLM API.",
    )
    ready_timeout: float = Field(
        defaults.READY_TIMEOUT, gt=0, description="Seconds allowed until the first token is generated."
    )
    restart: Restart = Field("never", description="on-failure: restart a failed server, with backoff.")
    dry_run: bool = Field(False, description="Print command and environment, start nothing.")
    verbose: bool = Field(False, description="Show the server's log on stderr.")

    @property
    def ports(self) -> dict[str, int]:
        """Port number by service."""
        openai = {} if self.openai_port is None else {"openai": self.openai_port}
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port} | openai

    @property
    def reachable_host(self) -> str:
        """The address under which this machine reaches the server."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host

    def address(self, port: int) -> str:
        """HOST:PORT for clients on this machine."""
        return f"{self.reachable_host}:{port}"
