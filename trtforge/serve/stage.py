"""`trtforge serve`: starts a server for a repository, waits for its first token, supervises it and cleans up."""

import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from trtforge import __version__
from trtforge.core.errors import ForgeError, Repair
from trtforge.core.manifest import Manifest
from trtforge.core.verified import open_to_run
from trtforge.formats.pbtxt import read_message
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.machine.processes import raise_open_file_limit
from trtforge.serve.address import LAST_PORT
from trtforge.serve.announcements import Announcements, Printed
from trtforge.serve.config import ServeConfig
from trtforge.serve.embedded import check_embedded, check_kv_cache_dir, check_trace, compile_kernels, remove_trace
from trtforge.serve.environment import close_shared_memory
from trtforge.serve.exposure import check_doors
from trtforge.serve.first_steps import first_steps
from trtforge.serve.gateway_process import with_openai_port
from trtforge.serve.host_checks import check_gpus, check_versions
from trtforge.serve.launchers import Launch, plan_launch, require_runnable
from trtforge.serve.probe import is_serving
from trtforge.serve.processes import runtime_directory
from trtforge.serve.reaper import Reaper
from trtforge.serve.restart import RestartPolicy, run_with_restarts
from trtforge.serve.stopping import StopRequest, stop_request
from trtforge.serve.supervise import Server, Service
from trtforge.serve.view import make_view

_LOG = logging.getLogger(__name__)
_POLL = 0.05
_FEWEST_FILES = 128  # Triton has 68 open when idle, and without more its accept() fails in an endless loop


def serve(config: ServeConfig, repo: Path, told: Announcements | None = None) -> int:
    """Serve `repo` until SIGTERM, SIGINT or SIGHUP; the exit status (see `Server.shut_down`).

    `told` is called when the ensemble has generated a token, also after each restart, and when OpenAI's API is served.
    By default it prints `ready http=… grpc=… metrics=…` and `openai=…` on stdout, and commands to try the server on
    stderr. Raises ForgeError for a damaged repository, an engine that cannot run here or in the image, a port in use,
    and a server that fails to start or breaks (with --restart on-failure: too often).
    """
    with with_openai_port(config) as settled:
        return _serve(settled, repo, told or Printed(), openai_required=config.openai_port is not None)


def _serve(config: ServeConfig, repo: Path, told: Announcements, *, openai_required: bool) -> int:
    manifest = open_to_run(repo, "repository")
    facts = read_facts(manifest)
    check_trace(facts, config.trace)
    check_kv_cache_dir(facts, config.kv_cache_dir)
    with runtime_directory() as runtime:
        launch = plan_launch(config, repo, facts, runtime)
        check_versions(facts, launch)
        if config.dry_run:
            print(launch.describe())
            return 0
    check_doors(config, launch)
    check_embedded(facts, repo)
    warn_of_version(manifest)
    warn_of_batcher(facts, repo)
    require_runnable(launch, facts)
    check_gpus(facts, launch)
    require_free_ports(config)
    require_open_files()
    compile_kernels(facts)
    remove_trace(facts, config.trace)
    policy = RestartPolicy() if config.restart == "on-failure" else None
    with stop_request() as stop, Reaper() as reaper:
        return run_with_restarts(
            lambda: _run(config, repo, facts, stop, reaper, told, openai_required=openai_required),
            policy,
            stop,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            clock=time.monotonic,
            restarting=told.restarting,
        )


def warn_of_version(manifest: Manifest) -> None:
    """Warn of a repository of another version, whose models may not match this version's interfaces."""
    packaged = manifest.identity.versions.get("trtforge")
    if packaged != __version__:
        _LOG.warning(
            f"trtforge {packaged} packaged the repository, this is {__version__}: package its engine again if it fails "
            "(`trtforge package ENGINE REPOSITORY`)"
        )


def warn_of_batcher(facts: RepositoryFacts, repository: Path) -> None:
    """Warn of a repository of an earlier version, which uses Triton's dynamic batcher for its Python models."""
    if read_message(repository / facts.model("ensemble") / "config.pbtxt").messages("dynamic_batching"):
        _LOG.warning(
            "an earlier trtforge packaged the repository: requests with different options wait for Triton's batcher, "
            "half a second at a time; package its engine again (`trtforge package ENGINE REPOSITORY`)"
        )


def require_free_ports(config: ServeConfig) -> None:
    """Raises ForgeError naming the ports on which it cannot listen (all used ones in one error) and their options."""
    if len(set(config.ports.values())) < len(config.ports):
        names = "HTTP, gRPC, metrics and OpenAI" if "openai" in config.ports else "HTTP, gRPC and metrics"
        raise ForgeError(f"the {names} ports must differ", hint="Choose different ports.")
    refused = {name: error for name, port in config.ports.items() if (error := _why_not(config.host, port)) is not None}
    used = {name: config.ports[name] for name, error in refused.items() if error.errno == errno.EADDRINUSE}
    for name, error in refused.items():
        if name not in used:
            raise ForgeError(
                f"cannot listen on {config.host}:{config.ports[name]} ({error.strerror})",
                hint=f"Choose another --{name}-port, or with --host an address of this machine.",
            )
    if used:
        listed = ", ".join(f"{config.host}:{port}" for port in used.values())
        others = dict(zip(used, _free_above(config), strict=False))
        choose = " ".join(f"--{name}-port {port}" for name, port in others.items())
        raise ForgeError(
            f"port in use: {listed}" if len(used) == 1 else f"ports in use: {listed}",
            hint=f"Stop the process that listens there, or choose others, such as {choose}.",
        ).repaired_by(Repair(options=tuple((f"--{name}-port", str(port)) for name, port in others.items())))


def require_open_files() -> None:
    """Raises ForgeError if the limit of open files is too low for the server to answer."""
    limit = raise_open_file_limit()
    if limit < _FEWEST_FILES:
        raise ForgeError(
            f"the limit of open files is {limit}, the server needs {_FEWEST_FILES} and more for each connection",
            hint="Raise it: `ulimit -n 4096`, LimitNOFILE of systemd, or `--ulimit nofile=4096` of docker.",
        )


def _why_not(host: str, port: int) -> OSError | None:
    """Why a port cannot be listened on; None if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def _free_above(config: ServeConfig) -> Iterator[int]:
    """Free ports above the configured ones."""
    for port in range(max(config.ports.values()) + 1, LAST_PORT + 1):
        if _why_not(config.host, port) is None:
            yield port


def _run(
    config: ServeConfig,
    repo: Path,
    facts: RepositoryFacts,
    stop: StopRequest,
    reaper: Reaper,
    told: Announcements,
    *,
    openai_required: bool,
) -> int:
    """Run the server once, in its own runtime directory, until it is stopped; the exit status."""
    told.starting()
    with runtime_directory() as runtime:
        launch = plan_launch(config, repo, facts, runtime, openai_required=openai_required)
        if launch.installation is not None:
            launch.installation.prepare()
        if launch.view is not None:
            make_view(repo, launch.view, facts)
        log = None if config.verbose else runtime / "triton.log"
        triton_http = config.address(config.http_port) if launch.front is None else launch.front.upstream
        service = Service(runtime, triton_http, facts.model("ensemble"), facts.model("tensorrt_llm"), log)
        server = Server(launch, service, stop, reaper)
        over = threading.Event()
        try:
            return _live(config, launch, service, server, told, over)
        finally:
            over.set()
            server.end()


def _live(
    config: ServeConfig,
    launch: Launch,
    service: Service,
    server: Server,
    told: Announcements,
    over: threading.Event,
) -> int:
    """Wait until a started server is ready, watch it until a stop is requested, and drain it; the exit status."""
    http, model = config.address(config.http_port), service.model
    if not server.wait_ready(lambda left: is_serving(http, config.grpc_address, model, left), config.ready_timeout):
        told.stopped("stopped before it was ready")
        return 0
    close_shared_memory(service.runtime.name)
    _announce(config, launch, model, told, over, server)
    server.watch()
    told.draining()
    ending = server.shut_down(config.drain_timeout)
    told.stopped(ending.line)
    return ending.status


def _announce(
    config: ServeConfig, launch: Launch, model: str, told: Announcements, over: threading.Event, server: Server
) -> None:
    """Announce where the server listens, then commands to try it.

    A thread announces the gateway, which imports its packages only after Triton listens, so as not to delay the start.
    `over`: set when the server has ended.
    """
    told.ready(config.address(config.http_port), config.grpc_address, config.address(config.metrics_port))
    if launch.gateway is None:
        told.complete(first_steps(config, model))
        return
    port = launch.gateway.port

    def announce_gateway() -> None:
        while not server.gateway_listens(port):
            if over.wait(_POLL):
                return
            if server.gateway_lost.is_set():
                told.complete(first_steps(config.model_copy(update={"openai": False}), model))
                return
        told.openai(f"http://{config.address(port)}/v1")
        told.complete(first_steps(config, model))

    threading.Thread(target=announce_gateway, name="gateway-line", daemon=True).start()
