"""How a repository is deployed: names, images, replicas, where its files come from."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from trtforge.core import defaults
from trtforge.core.builds import base_name
from trtforge.core.config_model import Config

Target = Literal["compose", "kubernetes", "helm"]
NAME = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
"""A DNS label, short enough for the suffixes of pods."""
Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
_LONGEST = 40
_PREFIX = "model"  # of a name that begins with a digit
_OBJECT = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"


def name_of(repository: Path) -> str:
    """A name from a repository's path: of its build if it is in one, else its own."""
    name = re.sub(r"[^a-z0-9]+", "-", base_name(repository).lower()).strip("-")[:_LONGEST].rstrip("-")
    return name if name[:1].isalpha() else f"{_PREFIX}-{name}".rstrip("-")[:_LONGEST].rstrip("-")


class DeployConfig(Config):
    """What every target takes."""

    name: str = Field("trtforge", pattern=NAME, description="Name of the deployment.")
    image: str | None = Field(None, pattern=r"^\S+$", description="Container image; None: the release's.")
    drain_timeout: float = Field(
        defaults.DRAIN_TIMEOUT, ge=0, description="Seconds that running requests may take when a server is stopped."
    )


class ComposeConfig(DeployConfig):
    """Of Docker Compose: ports are those of the host."""

    host: str = Field(defaults.LOOPBACK, description="Address of the host to listen on.")
    http_port: int = Field(defaults.HTTP_PORT, ge=1, le=65535)
    grpc_port: int = Field(defaults.GRPC_PORT, ge=1, le=65535)
    metrics_port: int = Field(defaults.METRICS_PORT, ge=1, le=65535)
    openai_port: int | None = Field(None, ge=1, le=65535)
    api_key_file: Path | None = Field(None, description="API keys, one per line.")


class ClusterConfig(DeployConfig):
    """Of Kubernetes, as plain manifests or as a chart."""

    namespace: Namespace = Field(defaults.NAMESPACE, description="Namespace of all objects.")
    pull_secret: str | None = Field(None, pattern=_OBJECT, description="Secret for the image's registry.")
    replicas: int = Field(1, ge=1, description="Replicas, each with the engine's ranks.")
    max_replicas: int | None = Field(None, ge=1, description="Replicas that autoscaling may add up to.")
    nodes: int = Field(1, ge=1, description="Nodes that the ranks of a replica are divided over.")
    pvc: str | None = Field(
        None, pattern=r"^[a-z0-9][-a-z0-9.]*(/[^/\s]+)*$", description="Claim that holds the repository."
    )
    repository_image: str | None = Field(None, pattern=r"^\S+$", description="OCI image that holds the repository.")
    api_key_secret: str | None = Field(None, pattern=_OBJECT, description="Secret with API keys.")
    ssh_secret: str | None = Field(None, pattern=_OBJECT, description="Secret with the key that nodes use among them.")
    client_namespaces: tuple[Namespace, ...] = Field((), description="Other namespaces whose pods may send requests.")
    monitoring: str = Field(defaults.MONITORING, description="Namespace of Prometheus; none: no monitoring.")

    @field_validator("pvc")
    @classmethod
    def _stays_below(cls, pvc: str | None) -> str | None:
        if pvc is not None and {".", ".."} & set(pvc.split("/")):
            raise ValueError("a directory of a claim has no . and ..")
        return pvc

    @property
    def scales(self) -> bool:
        """Whether replicas are added and removed by load."""
        return self.max_replicas is not None and self.max_replicas > self.replicas
