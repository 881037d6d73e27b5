"""The configuration of a gateway: backends, models, addresses."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from trtforge.core import defaults
from trtforge.core.config_model import Config
from trtforge.core.host_check import AllowedHost
from trtforge.core.reasoning import ReasoningParser

_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", re.ASCII)


class GatewayConfig(Config):
    """The options of `trtforge gateway`."""

    backends: tuple[str, ...] = Field(min_length=1, description="HOST:PORT of each server's gRPC endpoint.")
    context_backends: tuple[str, ...] = Field(
        (), description="HOST:PORT of servers that compute prompts, from which those of `backends` then generate."
    )
    models: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Text models; empty: those that the servers list."
    )
    served_model_name: str | None = Field(None, min_length=1, description="Another name of the first model.")
    adapters: dict[str, int] = Field({}, description="Task ids of the first model's LoRA adapters, by name.")
    reasoning_parser: ReasoningParser | None = Field(
        None, description="Form of the reasoning that chat returns apart from the answer."
    )
    host: str = Field(defaults.LOOPBACK, description="Address to listen on.")
    port: int = Field(defaults.GATEWAY_PORT, ge=1, le=65535, description="Port to listen on.")
    api_key_file: Path | None = Field(
        None, description="API keys, one per line, each of at least 16 characters; clients must send one."
    )
    allowed_hosts: tuple[AllowedHost, ...] = Field(
        (), description="Host names besides localhost for clients of a gateway on loopback without API keys."
    )
    drain_timeout: float = Field(
        defaults.DRAIN_TIMEOUT, ge=0, description="Seconds that running requests may take after SIGTERM."
    )

    @field_validator("backends", "context_backends")
    @classmethod
    def _are_addresses(cls, backends: tuple[str, ...]) -> tuple[str, ...]:
        for backend in backends:
            if _ADDRESS.fullmatch(backend) is None:
                raise ValueError(f"{backend!r} is not HOST:PORT, the address of a gRPC endpoint without scheme")
        return backends

    @property
    def address(self) -> str:
        """HOST:PORT for clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
