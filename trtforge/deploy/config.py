"""How a repository is deployed: names, images, replicas and the source of its files."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from trtforge.core import defaults
from trtforge.core.builds import base_name
from trtforge.core.config_model import Config
from trtforge.core.reasoning import ReasoningParser

Target = Literal["compose", "kubernetes", "helm"]
LONGEST_NAME = 40
"""Characters of a deployment's name: Kubernetes adds suffixes, and labels have at most 63."""
_PREFIX = "model"  # of a name that begins with a digit


def _form(pattern: str, form: str) -> AfterValidator:
    """The form of a string, as a regular expression and in words."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is not {form}")
        return value

    return AfterValidator(check)


def name_pattern(longest: int) -> str:
    """The regular expression of a name of at most `longest` characters that Kubernetes accepts for a Service.

    Python and Go read it alike.
    """
    return f"[a-z](?:[-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?"


Name = Annotated[
    str,
    _form(
        name_pattern(LONGEST_NAME),
        f"a name of at most {LONGEST_NAME} lower-case letters, digits and hyphens, a letter first",
    ),
]
Namespace = Annotated[
    str, _form(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", "a namespace: lower-case letters, digits and hyphens")
]
_LABEL = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
ObjectName = Annotated[
    str,
    _form(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*", "a name of lower-case letters, digits, hyphens and dots"),
]
_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
Image = Annotated[
    str,
    _form(
        rf"(?:(?=localhost[:/]|[^/]*[.:])[a-zA-Z0-9][-a-zA-Z0-9.]*(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?"
        "(?:@sha256:[0-9a-f]{64})?",
        "an image: [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST], NAME in lower case",
    ),
]
"""The syntax of distribution/reference (https://github.com/distribution/reference, regexp.go)."""
Claim = Annotated[
    str,
    _form(
        r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?(?:/(?!\.{1,2}(?:/|$))[^/\s]+)*",
        "NAME or NAME/DIRECTORY, a directory inside of the claim",
    ),
]


def _ip_address(value: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address, as Docker needs it") from None
    return value


def name_of(repository: Path) -> str:
    """A name from a repository's path: that of its build if it is in one, else its own."""
    name = re.sub(r"[^a-z0-9]+", "-", base_name(repository).lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    return name if name[:1].isalpha() else f"{_PREFIX}-{name}".rstrip("-")[:LONGEST_NAME].rstrip("-")


class DeployConfig(Config):
    """The options of all targets."""

    name: Name = Field("trtforge", description="Name of the deployment.")
    image: Image | None = Field(None, description="Container image; None: the release's.")
    drain_timeout: float = Field(
        defaults.DRAIN_TIMEOUT, ge=0, description="Seconds that running requests may take when a server is stopped."
    )
    reasoning_parser: ReasoningParser | None = Field(
        None, description="Form of the reasoning that OpenAI's API returns apart from the answer."
    )


class ComposeConfig(DeployConfig):
    """The options for Docker Compose; ports are the host's."""

    host: Annotated[str, AfterValidator(_ip_address)] = Field(
        defaults.LOOPBACK, description="Address of the host to listen on."
    )
    http_port: int = Field(defaults.HTTP_PORT, ge=1, le=65535)
    grpc_port: int = Field(defaults.GRPC_PORT, ge=1, le=65535)
    metrics_port: int = Field(defaults.METRICS_PORT, ge=1, le=65535)
    openai_port: int | None = Field(None, ge=1, le=65535)
    api_key_file: Path | None = Field(None, description="API keys, one per line.")


class ClusterConfig(DeployConfig):
    """Options of the Kubernetes targets: plain manifests or a chart."""

    namespace: Namespace = Field(defaults.NAMESPACE, description="Namespace of all objects.")
    pull_secret: ObjectName | None = Field(None, description="Secret for the image's registry.")
    replicas: int = Field(1, ge=1, description="Replicas, each with the engine's ranks.")
    max_replicas: int | None = Field(None, ge=1, description="Replicas that autoscaling may add up to.")
    nodes: int = Field(1, ge=1, description="Number of nodes that share the ranks of a replica.")
    pvc: Claim | None = Field(None, description="Claim with the repository.")
    repository_image: Image | None = Field(None, description="OCI image with the repository.")
    api_key_secret: ObjectName | None = Field(None, description="Secret with API keys.")
    ssh_secret: ObjectName | None = Field(None, description="Secret with the SSH key for connections between nodes.")
    client_namespaces: tuple[Namespace, ...] = Field((), description="Other namespaces whose pods may send requests.")
    monitoring: Namespace = Field(defaults.MONITORING, description="Namespace of Prometheus; none: no monitoring.")

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None and self.max_replicas > self.replicas
