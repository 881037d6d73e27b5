"""compose.yaml: one server on one host, with Docker Compose."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import join
from typing import Any

from trtforge.core.api_keys import read_key_file
from trtforge.core.errors import UsageError
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
    """The container. Raises ForgeError if one container cannot serve the repository, and for a port that is given
    twice."""
    workload = plan_workload(
        manifest,
        image=config.image,
        drain_timeout=config.drain_timeout,
        keys=config.api_key_file is not None,
        openai=config.openai_port is not None,
        reasoning=config.reasoning_parser,
    )
    if config.reasoning_parser is not None and config.openai_port is None:
        raise UsageError(
            "--reasoning-parser is an option of OpenAI's API, which is served with --openai-port",
            hint="Give both, or leave --reasoning-parser out.",
        )
    options: dict[int | None, str] = {}
    for name, port in _of_host(workload, config).items():
        option = f"--{name}-port"
        if port in options:
            raise UsageError(
                f"{options[port]} and {option} are the same port of the host: {port}",
                hint="Choose different ports.",
            )
        options[port] = option
    return workload


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


def unreadable(manifest: Manifest, repository: Path, *, in_image: bool = False) -> Iterator[str]:
    """A warning about the first file or directory of a local repository that the container's user cannot read.

    `in_image`: the repository is copied into an image, where root owns it.
    """
    names = sorted({part.as_posix() for name in manifest.files for part in (Path(name), *Path(name).parents)})
    paths = (path for name in names if (path := repository / name).exists())
    found = next((path for path in paths if not _may_read(path, of_root=in_image)), None)
    if found is not None:
        yield _no_right(found, ["chmod", "-R", "a+rX", str(repository)])


def unready_keys(file: Path) -> Iterator[str]:
    """A warning about a file of API keys that does not exist yet or that the container's user cannot read.

    Raises ForgeError for a file without keys, unless only the container's user can read it.
    """
    if not file.exists():
        yield f"{file} does not exist yet: write the API keys to it, one per line, before the server starts"
        return
    if os.access(file, os.R_OK):
        read_key_file(file)
    if not _may_read(file):
        yield _no_right(file, ["chown", str(USER), str(file)])


def _no_right(path: Path, fix: list[str]) -> str:
    return f"user {USER}, as which the server runs, may not read {path}: allow it with `{join(fix)}`"


def _may_read(path: Path, *, of_root: bool = False) -> bool:
    """Whether the container's user can read a file or list a directory; `of_root`: if root owned it."""
    found = path.stat()
    needed = 0o5 if path.is_dir() else 0o4
    shift = 0 if of_root else 6 if found.st_uid == USER else 3 if found.st_gid == USER else 0
    return (found.st_mode >> shift) & needed == needed


def relative(path: Path, out: Path) -> str:
    """A path relative to the directory of compose.yaml; it begins with a dot, by which Compose recognises paths.

    If `out` is behind a symbolic link, the path is absolute, because Compose resolves `..` by names only.
    """
    if out.resolve() != Path(os.path.abspath(out)):
        return _escaped(str(path.resolve()))
    found = os.path.relpath(path.resolve(), out.resolve())
    return _escaped(found if found.startswith(".") else f"./{found}")


def _service(workload: Workload, config: ComposeConfig, repository: str) -> Mapping[str, Any]:
    # A default ends at the first brace, which Compose cannot escape.
    source = repository if "}" in repository else f"${{{REPOSITORY_VARIABLE}:-{repository}}}"
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
        "tmpfs": [f"{SCRATCH}:mode=1777,exec"],  # not noexec: compiled kernels are loaded from there
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
    """The mapped ports, on the host's loopback interface unless another address is given."""
    return [
        {"name": name, "target": workload.ports[name], "published": str(port), "host_ip": config.host}
        for name, port in _of_host(workload, config).items()
    ]


def _of_host(workload: Workload, config: ComposeConfig) -> dict[str, int | None]:
    """The host's port for each of the container's ports."""
    ports = {
        "http": config.http_port,
        "grpc": config.grpc_port,
        "metrics": config.metrics_port,
        "openai": config.openai_port,
    }
    return {name: ports[name] for name in workload.ports}


def _escaped(word: str) -> str:
    """The word, escaped so that Compose replaces no variables."""
    return word.replace("$", "$$")
