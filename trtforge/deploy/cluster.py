"""All objects of a deployment on Kubernetes, by the file of their kind, for plain manifests and the chart."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import Manifest
from trtforge.deploy.cluster_settings import ClusterSettings, cluster_settings
from trtforge.deploy.config import ClusterConfig
from trtforge.deploy.images import dockerfiles
from trtforge.deploy.leader_worker import GROUP, RANKS, headless_service, leader_worker_set, placeholders
from trtforge.deploy.monitoring import dashboard_map, pod_monitor, prometheus_rule
from trtforge.deploy.network import namespace, network_policy, service, service_account
from trtforge.deploy.pods import PODS, deployment
from trtforge.deploy.scaling import disruption_budget, scaled_object
from trtforge.deploy.values import Node, text
from trtforge.deploy.workload import Workload, plan_workload
from trtforge.formats.triton import RepositoryFacts, read_facts


@dataclass(frozen=True)
class Cluster:
    """A deployment on Kubernetes. `objects`: by file name; `namespace`: the Namespace, which is not part of a chart."""

    config: ClusterConfig
    workload: Workload
    settings: ClusterSettings
    objects: Mapping[str, tuple[Node, ...]]
    namespace: Node

    @property
    def dockerfiles(self) -> dict[str, str]:
        """The Dockerfiles of its images, by file name."""
        return dockerfiles(self.workload, nodes=self.config.nodes, repository_image=self.config.repository_image)


def plan_cluster(manifest: Manifest, config: ClusterConfig) -> Cluster:
    """The objects of a repository's deployment. Raises ForgeError for a deployment that is not possible."""
    facts = read_facts(manifest)
    _require_repository(config)
    _require_nodes(config, facts)
    if config.max_replicas is not None and config.max_replicas < config.replicas:
        raise UsageError(
            f"--max-replicas {config.max_replicas} is less than --replicas {config.replicas}",
            hint="Give the most that autoscaling may add up to, or leave it out.",
        )
    if config.scales and config.monitoring == "none":
        raise UsageError(
            "--max-replicas needs --monitoring: replicas are added by what Prometheus knows of the pods",
            hint="Name Prometheus's namespace with --monitoring, or leave --max-replicas out.",
        )
    workload = plan_workload(
        manifest,
        image=config.image,
        drain_timeout=config.drain_timeout,
        keys=config.api_key_secret is not None,
        hosts=placeholders(config.nodes),
        probed=True,
        reasoning=config.reasoning_parser,
    )
    settings = cluster_settings(config, workload)
    several, counted = config.nodes > 1, facts.backend != "tensorrt_llm"
    pods = leader_worker_set if several else deployment
    owner = GROUP | {"name": text(settings.name, RANKS)} if several else PODS | {"name": settings.name}
    services = [service(workload, settings, config.nodes), *([headless_service(settings)] if several else ())]
    objects: dict[str, tuple[Node, ...]] = {
        "serviceaccount.yaml": (service_account(settings),),
        f"{'leaderworkerset' if several else 'deployment'}.yaml": (pods(config, workload, settings),),
        "service.yaml": tuple(services),
        "poddisruptionbudget.yaml": (disruption_budget(settings, config.nodes),),
        "networkpolicy.yaml": (network_policy(workload, settings, config.nodes),),
        "podmonitor.yaml": (pod_monitor(settings),),
        "prometheusrule.yaml": (prometheus_rule(settings, counted=counted),),
        "configmap.yaml": (dashboard_map(settings, config.name, gpus=workload.gpus > 0, counted=counted),),
        "scaledobject.yaml": (scaled_object(settings, owner, facts.max_batch_size),),
    }
    return Cluster(config, workload, settings, objects, namespace(settings))


def _require_repository(config: ClusterConfig) -> None:
    if (config.pvc is None) == (config.repository_image is None):
        raise UsageError(
            "the pods need the repository from one place: --pvc or --repository-image",
            hint="--pvc NAME/DIRECTORY mounts a claim that holds it; --repository-image IMAGE an OCI image, whose "
            "Dockerfile is written too.",
        )


def _require_nodes(config: ClusterConfig, facts: RepositoryFacts) -> None:
    """Raises an error for ranks not started by MPI or not divisible by the nodes, and for nodes without a key."""
    if config.nodes == 1:
        if config.ssh_secret is not None:
            raise UsageError("--ssh-secret applies only to several nodes", hint="Add --nodes, or leave it out.")
        return
    if facts.backend != "tensorrt_llm" or facts.orchestrated:
        what = f"an engine of backend {facts.backend}" if facts.backend != "tensorrt_llm" else "orchestrator mode"
        raise ForgeError(
            f"--nodes {config.nodes}: {what} runs on one node",
            hint="Leave --nodes out; TensorRT-LLM engines without instances of their own run over several."
            if facts.backend != "llmapi"
            else "Leave --nodes out, or use `trtforge serve --launcher slurm --nodes N --dry-run`.",
        )
    if facts.world_size % config.nodes or facts.world_size == 1:
        raise ForgeError(
            f"{facts.world_size} ranks cannot be divided over {config.nodes} nodes",
            hint="Use a number of nodes that divides the ranks.",
        )
    if config.ssh_secret is None:
        raise UsageError(
            f"--nodes {config.nodes} needs --ssh-secret: mpirun starts the ranks of other nodes over ssh",
            hint="Make a key with `ssh-keygen -t ed25519 -N '' -f key`, and the Secret with `kubectl create secret "
            "generic NAME --type kubernetes.io/ssh-auth --from-file=ssh-privatekey=key "
            "--from-file=ssh-publickey=key.pub`.",
        )
    if config.image is None:
        raise UsageError(
            f"--nodes {config.nodes} needs --image: NVIDIA's image has no sshd, which mpirun needs on other nodes",
            hint="Name the image that you build from the Dockerfile that is written.",
        )
