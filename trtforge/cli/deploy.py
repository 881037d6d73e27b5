"""`trtforge deploy`: the files that run a repository with Docker Compose, Kubernetes or Helm."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.help import Command, Group
from trtforge.cli.options import ENDPOINTS, MOST_SECONDS, Force, Json, Out, ReasoningParserOption, Verbose, from_options
from trtforge.core import defaults

if TYPE_CHECKING:
    from trtforge.deploy.config import DeployConfig, Target

_SERVER, _CLUSTER, _SCALE = "Server", "Cluster", "Replicas and nodes"

deploy = typer.Typer(
    cls=Group,
    help="Write the files that run a repository in containers.\n\n"
    "They are made from the repository's manifest, without docker, a cluster or a GPU.\n\n"
    "Example: trtforge deploy kubernetes build/llama/repository ./manifests --pvc models/llama",
    no_args_is_help=True,
)

_Repo = Annotated[
    Path, typer.Argument(metavar="REPO", help="Triton model repository or build directory.", show_default=False)
]
_Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_SERVER,
        help="Name of the deployment.",
        show_default="the repository's or build's",
    ),
]
_Image = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE",
        rich_help_panel=_SERVER,
        help="Container image of the server.",
        show_default="NVIDIA's of the engine's release; for the embedded engine the one that the Dockerfile builds",
    ),
]
_PullSecret = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=_SERVER, help="Secret for the registry of the image.", show_default=False
    ),
]
_DrainTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        max=MOST_SECONDS,
        metavar="SECONDS",
        rich_help_panel=_SERVER,
        help="Time for running requests to finish when a server is stopped.",
    ),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")]
_Namespace = Annotated[str, typer.Option(metavar="NAME", rich_help_panel=_CLUSTER, help="Namespace of all objects.")]
_Replicas = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=_SCALE, help="Replicas, each with all ranks of the engine.")
]
_MaxReplicas = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=_SCALE,
        help="Maximum replicas; KEDA scales by running and waiting requests and the KV cache.",
        show_default="no autoscaling",
    ),
]
_Nodes = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=_SCALE,
        help="Nodes over which the ranks of a replica are divided, as a LeaderWorkerSet.",
    ),
]
_SshSecret = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_SCALE,
        help="With --nodes: Secret of type kubernetes.io/ssh-auth, also with ssh-publickey.",
        show_default=False,
    ),
]
_Pvc = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[/DIRECTORY]",
        rich_help_panel=_CLUSTER,
        help="PersistentVolumeClaim, and the directory in it, with the repository.",
        show_default=False,
    ),
]
_RepositoryImage = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE",
        rich_help_panel=_CLUSTER,
        help="OCI image with the repository, for an image volume (Kubernetes 1.35 and later; 1.33 and 1.34 with the "
        "feature gate ImageVolume).",
        show_default=False,
    ),
]
_ApiKeySecret = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_CLUSTER,
        help="Secret whose key api-keys holds API keys, one per line; HTTP clients must send one of them.",
        show_default=False,
    ),
]
_ClientNamespace = Annotated[
    list[str] | None,
    typer.Option(
        "--client-namespace",
        metavar="NAME",
        rich_help_panel=_CLUSTER,
        help="Namespace whose pods may send requests too, such as that of an ingress controller; repeatable.",
    ),
]
_Monitoring = Annotated[
    str,
    typer.Option(
        metavar="NAMESPACE|none",
        rich_help_panel=_CLUSTER,
        help="Namespace of Prometheus, with its operator; none: no monitor, alerts and dashboard.",
    ),
]


@deploy.command("compose", cls=Command)
def compose(
    repo: _Repo,
    out: Out,
    name: _Name = None,
    image: _Image = None,
    drain_timeout: _DrainTimeout = defaults.DRAIN_TIMEOUT,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", rich_help_panel=ENDPOINTS, help="Address of the host to listen on."),
    ] = defaults.LOOPBACK,
    http_port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="HTTP port of the host.")
    ] = defaults.HTTP_PORT,
    grpc_port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="gRPC port of the host.")
    ] = defaults.GRPC_PORT,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the Prometheus metrics."
        ),
    ] = defaults.METRICS_PORT,
    reasoning_parser: ReasoningParserOption = None,
    openai_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            rich_help_panel=ENDPOINTS,
            help="Port of OpenAI's API, for the embedded engine.",
            show_default="no OpenAI API",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=ENDPOINTS,
            help="API keys, one per line, which the server gets as a secret of Compose; for the embedded engine.",
            show_default=False,
        ),
    ] = None,
    dry_run: _DryRun = False,
    force: Force = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write compose.yaml for one server on one host.

    The server's root file system is read-only, it has no capabilities, and its ports are those of the host's loopback
    interface unless --host is given. For the embedded engine a Dockerfile is written too.

    Example: trtforge deploy compose build/demo-int4awq ./compose --openai-port 8003
    """
    from trtforge.deploy.config import ComposeConfig

    values = {
        "image": image,
        "drain_timeout": drain_timeout,
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "openai_port": openai_port,
        "reasoning_parser": reasoning_parser,
        "api_key_file": api_key_file,
    }
    config = from_options(ComposeConfig, values | _named(name, repo), "deploy compose")
    _run("compose", config, repo, out, dry_run=dry_run, force=force, json=json)


def _cluster_command(target: "Target", about: str) -> Callable[..., None]:
    """The command of a target that is a cluster; `about`: its help."""

    def command(
        repo: _Repo,
        out: Out,
        name: _Name = None,
        image: _Image = None,
        pull_secret: _PullSecret = None,
        drain_timeout: _DrainTimeout = defaults.DRAIN_TIMEOUT,
        namespace: _Namespace = defaults.NAMESPACE,
        pvc: _Pvc = None,
        repository_image: _RepositoryImage = None,
        api_key_secret: _ApiKeySecret = None,
        client_namespace: _ClientNamespace = None,
        reasoning_parser: ReasoningParserOption = None,
        monitoring: _Monitoring = defaults.MONITORING,
        replicas: _Replicas = 1,
        max_replicas: _MaxReplicas = None,
        nodes: _Nodes = 1,
        ssh_secret: _SshSecret = None,
        dry_run: _DryRun = False,
        force: Force = False,
        json: Json = False,
        verbose: Verbose = False,
    ) -> None:
        from trtforge.deploy.config import ClusterConfig

        values = {
            "image": image,
            "pull_secret": pull_secret,
            "drain_timeout": drain_timeout,
            "namespace": namespace,
            "pvc": pvc,
            "repository_image": repository_image,
            "api_key_secret": api_key_secret,
            "client_namespaces": client_namespace or (),
            "reasoning_parser": reasoning_parser,
            "monitoring": monitoring,
            "replicas": replicas,
            "max_replicas": max_replicas,
            "nodes": nodes,
            "ssh_secret": ssh_secret,
        }
        config = from_options(ClusterConfig, values | _named(name, repo), f"deploy {target}")
        _run(target, config, repo, out, dry_run=dry_run, force=force, json=json)

    command.__doc__ = about
    return command


deploy.command("kubernetes", cls=Command)(
    _cluster_command(
        "kubernetes",
        """Write manifests, a file for each kind of object, and kustomization.yaml.

    A Deployment, or over several nodes a LeaderWorkerSet, with Service, NetworkPolicy, PodDisruptionBudget, PodMonitor,
    alerts, a Grafana dashboard, and with --max-replicas a ScaledObject of KEDA.

    Example: trtforge deploy kubernetes build/llama/repository ./manifests --pvc models/llama --max-replicas 4
    """,
    )
)
deploy.command("helm", cls=Command)(
    _cluster_command(
        "helm",
        """Write a chart with the objects of `trtforge deploy kubernetes`.

    The options become the chart's values.yaml, which `helm install --set` overrides: image, replicas, volumes,
    resources, labels and taints of nodes, autoscaling, monitoring. GPUs and nodes of a replica follow from the engine.

    Example: trtforge deploy helm build/llama/repository ./chart --pvc models/llama --replicas 2
    """,
    )
)


def _named(name: str | None, repo: Path) -> dict[str, str]:
    from trtforge.deploy.config import name_of

    return {"name": name if name is not None else name_of(repo)}


def _run(
    target: "Target", config: "DeployConfig", repo: Path, out: Path, *, dry_run: bool, force: bool, json: bool
) -> None:
    """Plan the files, and write or print them."""
    from trtforge.cli.places import artifact_at
    from trtforge.core.output_place import require_output
    from trtforge.deploy.images import WHEEL
    from trtforge.deploy.stage import plan_deployment, write_deployment

    require_output(out, "deployment")
    planned = plan_deployment(target, config, artifact_at(repo, "repository"), out)
    about = {"target": target, "name": config.name, "image": planned.workload.image, "gpus": planned.workload.gpus}
    if dry_run:
        if json:
            show.as_json(about | {"files": dict(planned.files), "next": planned.next})
        else:
            print(planned.as_text(), end="")
        return
    result = write_deployment(planned, out, force=force)
    if not json:
        print(f"image: {planned.workload.image}")
        show.line(f"files: {', '.join(sorted(planned.files))}")
        if planned.workload.embedded:
            show.line(f"wheel: DIRECTORY holds {WHEEL}, from `pip wheel --no-deps --wheel-dir DIRECTORY SOURCE`")
    show.produced(result, json_output=json, next_command=planned.next, more=about | {"names": sorted(planned.files)})
