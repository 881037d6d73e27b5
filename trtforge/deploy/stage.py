"""The deploy stage: the files that run a repository, from its manifest alone."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from trtforge import __version__
from trtforge.core.artifact import Produced, produce
from trtforge.core.digest import text_digest
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity, fault_of, require_manifest
from trtforge.core.output_place import replaceable
from trtforge.deploy.chart import chart
from trtforge.deploy.cluster import plan_cluster
from trtforge.deploy.compose import COMPOSE_FILE, compose_files, plan_compose, unreadable, unready_keys
from trtforge.deploy.config import ClusterConfig, ComposeConfig, DeployConfig, Target
from trtforge.deploy.images import DOCKERFILE, REPOSITORY_DOCKERFILE, WHEEL_CONTEXT
from trtforge.deploy.kubernetes import KUSTOMIZATION, manifests
from trtforge.deploy.workload import EMBEDDED_IMAGE, Workload

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployment:
    """The files of a deployment by name. `next`: the command that starts it."""

    target: Target
    config: DeployConfig
    repository: str
    files: Mapping[str, str]
    workload: Workload
    next: str

    def as_text(self) -> str:
        """All files as text: manifests as one stream for `kubectl apply --filename -`, others as comments."""
        if self.target == "kubernetes":
            files = {name: text for name, text in self.files.items() if name != KUSTOMIZATION}
            objects = [text for name, text in files.items() if name.endswith(".yaml")]
            others = [f"# {name}\n{text}" for name, text in files.items() if not name.endswith(".yaml")]
            comments = [f"# {line}".rstrip() + "\n" for text in others for line in text.splitlines()]
            return "---\n".join(objects) + "".join(comments)
        return "\n".join(f"# {name}\n{text}" for name, text in self.files.items())


def plan_deployment(target: Target, config: DeployConfig, repository: Path, out: Path) -> Deployment:
    """The files for a repository; nothing is written. Raises ForgeError for a deployment that is not possible."""
    manifest = require_manifest(repository, "repository")
    if isinstance(config, ComposeConfig):
        workload = plan_compose(manifest, config)
        files = compose_files(workload, config, repository, out)
        warnings = [*workload.warnings, *unreadable(manifest, repository)]
        warnings += unready_keys(config.api_key_file) if config.api_key_file is not None else ()
        start = ["docker", "compose", "--file", str(out / COMPOSE_FILE), "up", "--detach"]
    else:
        assert isinstance(config, ClusterConfig)
        cluster = plan_cluster(manifest, config)
        workload, warnings = cluster.workload, [*cluster.workload.warnings]
        warnings += unreadable(manifest, repository, in_image=True) if config.repository_image is not None else ()
        files = chart(cluster) if target == "helm" else manifests(cluster)
        place = ["--namespace", config.namespace, "--create-namespace"]
        kubectl = ["kubectl", "apply", "--kustomize", str(out)]
        start = ["helm", "upgrade", "--install", config.name, str(out), *place] if target == "helm" else kubectl
    commands = [*_image_commands(target, config, workload, files, repository, out), start]
    for warning in warnings:
        _LOG.warning(warning)
    if target != "compose" and workload.image == EMBEDDED_IMAGE:
        _LOG.warning(
            f"{EMBEDDED_IMAGE} is in no registry: name one with --image REGISTRY/NAME, or load the image on every node"
        )
    return Deployment(target, config, manifest.digest, files, workload, " && ".join(map(join, commands)))


def _image_commands(
    target: Target, config: DeployConfig, workload: Workload, files: Mapping[str, str], repository: Path, out: Path
) -> Iterator[list[str]]:
    """Commands that build the Dockerfiles' images and, for a cluster, push those with a registry."""
    images = []
    if DOCKERFILE in files:
        context = ["--build-context", f"{WHEEL_CONTEXT}=DIRECTORY"] if workload.embedded else []
        images.append((workload.image, [*context, str(out)]))
    if isinstance(config, ClusterConfig) and config.repository_image is not None:
        images.append((config.repository_image, ["--file", str(out / REPOSITORY_DOCKERFILE), str(repository)]))
    for image, words in images:
        if "@" in image:  # a digest names an existing image and cannot be given to another
            continue
        yield ["docker", "build", "--tag", image, *words]
        if target != "compose" and image != EMBEDDED_IMAGE:
            yield ["docker", "push", image]


def _require_unchanged(out: Path) -> None:
    """Raises ForgeError for files that were edited, as is usual with manifests and values."""
    there = replaceable(out, "deployment")
    files = {} if there is None else there.files
    changed = next((name for name, record in files.items() if _is_changed(out / name, record)), None)
    if changed is not None:
        raise ForgeError(
            f"{out / changed} was changed after it was written",
            hint="Choose another directory and compare, or replace it with --force.",
        )


def _is_changed(path: Path, record: FileRecord) -> bool:
    return path.is_file() and fault_of(path, record) is not None


def write_deployment(deployment: Deployment, out: Path, *, force: bool = False) -> Produced:
    """Write the files to `out`, unless they are already there.

    Raises ForgeError if there are foreign files, or without `force` files that were edited after they were written.
    """
    if not force:
        _require_unchanged(out)

    def write(directory: Path) -> Mapping[str, FileRecord]:
        for name, text in deployment.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        return {}

    identity = Identity(
        stage="deployment",
        config={"target": deployment.target, **deployment.config.model_dump(mode="json", exclude={"api_key_file"})},
        inputs={
            "repository": deployment.repository,
            "files": text_digest("\0".join(f"{name}\0{text}" for name, text in deployment.files.items())),
        },
        versions={"trtforge": __version__},
    )
    return produce(out, identity, write, force=force)
