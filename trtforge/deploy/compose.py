"""compose.yaml: one server on one host, with Docker Compose."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.core.manifest import Manifest
from trtforge.deploy.config import ComposeConfig
from trtforge.deploy.images import WHEEL_CONTEXT, dockerfiles
from trtforge.deploy.probes import FAILURES, READY_PERIOD, READY_TIMEOUT
from trtforge.deploy.values import as_yaml
from trtforge.deploy.workload import CACHE, KEY_FILE, SCRATCH, USER, Workload, plan_workload
from trtforge.launch.containers import SHARED_MEMORY_GIB, STACK_BYTES

COMPOSE_FILE = "compose.yaml"
REPOSITORY_VARIABLE, WHEEL_VARIABLE = "TRTFORGE_REPOSITORY", "TRTFORGE_WHEEL"
_OPEN_FILES = 65536


def plan_compose(manifest: Manifest, config: ComposeConfig) -> Workload:
    """The container. Raises ForgeError for what cannot be served by one."""
    return plan_workload(
        manifest,
        image=config.image,
        drain_timeout=config.drain_timeout,
        keys=config.api_key_file is not None,
        openai=config.openai_port is not None,
    )


def compose_files(workload: Workload, config: ComposeConfig, repository: Path, out: Path) -> dict[str, str]:
    """The files; paths in them are relative to `out`."""
    secrets = {}
    if config.api_key_file is not None:
        secrets = {"secrets": {KEY_FILE.name: {"file": relative(config.api_key_file, out)}}}
    value = {
        "name": config.name,
        "services": {"server": _service(workload, config, relative(repository, out))},
        **({"volumes": {"cache": {}}} if workload.embedded else {}),
        **secrets,
    }
    return {COMPOSE_FILE: as_yaml(value), **dockerfiles(workload)}


def relative(path: Path, out: Path) -> str:
    """A path from the directory of compose.yaml, which begins with a dot as Compose expects it of a path."""
    found = os.path.relpath(path.resolve(), out.resolve())
    return _escaped(found if found.startswith(".") else f"./{found}")


def _service(workload: Workload, config: ComposeConfig, repository: str) -> Mapping[str, Any]:
    source = f"${{{REPOSITORY_VARIABLE}:-{repository}}}"
    mounts: list[Mapping[str, Any]] = [
        {
            "type": "bind",
            "source": source,
            "target": _escaped(workload.root),
            "read_only": True,
            "bind": {"create_host_path": False},
        }
    ]
    if workload.embedded:
        mounts.append({"type": "volume", "source": "cache", "target": CACHE})
    service: dict[str, Any] = {"image": workload.image}
    if workload.embedded:
        service["build"] = {"context": ".", "additional_contexts": {WHEEL_CONTEXT: f"${{{WHEEL_VARIABLE}:-.}}"}}
    service |= {
        "command": list(map(_escaped, workload.command)),
        "environment": {name: _escaped(value) for name, value in sorted(workload.environment.items())},
        "volumes": mounts,
        "ports": _ports(workload, config),
        "healthcheck": {
            "test": ["CMD", *map(_escaped, workload.probes.ready)],
            "interval": f"{READY_PERIOD}s",
            "timeout": f"{READY_TIMEOUT}s",
            "retries": FAILURES,
            "start_period": f"{workload.start_seconds}s",
        },
        "init": True,
        "user": f"{USER}:{USER}",
        "read_only": True,
        "tmpfs": [f"{SCRATCH}:mode=1777"],
        "shm_size": f"{SHARED_MEMORY_GIB}gb",
        "ulimits": {"memlock": -1, "stack": STACK_BYTES, "nofile": _OPEN_FILES},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{workload.stop_seconds}s",
    }
    if workload.drains:
        service["pre_stop"] = [{"command": list(map(_escaped, workload.drains))}]
    if config.api_key_file is not None:
        service["secrets"] = [KEY_FILE.name]
    if workload.gpus:
        devices = [{"driver": "nvidia", "count": workload.gpus, "capabilities": ["gpu"]}]
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    return service


def _ports(workload: Workload, config: ComposeConfig) -> list[Mapping[str, Any]]:
    """Ports of the host, on its loopback interface unless another address is given."""
    of_host = {
        "http": config.http_port,
        "grpc": config.grpc_port,
        "metrics": config.metrics_port,
        "openai": config.openai_port,
    }
    return [
        {"name": name, "target": port, "published": str(of_host[name]), "host_ip": config.host}
        for name, port in workload.ports.items()
    ]


def _escaped(word: str) -> str:
    """A word in which Compose replaces no variables."""
    return word.replace("$", "$$")
