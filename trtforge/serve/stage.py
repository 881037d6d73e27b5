"""`trtforge serve`: from a repository to a server that has generated a token, and back to nothing."""

import socket
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.verified import open_to_run
from trtforge.formats.triton import RepositoryFacts, read_facts
from trtforge.serve.config import ServeConfig
from trtforge.serve.embedded import check_embedded
from trtforge.serve.launchers import Launch, plan_launch, require_runnable
from trtforge.serve.place import check_gpus, check_versions
from trtforge.serve.probe import is_serving
from trtforge.serve.processes import runtime_directory
from trtforge.serve.supervise import Server, signals_to
from trtforge.serve.view import make_view


def serve(config: ServeConfig, repo: Path) -> int:
    """Serve `repo` in the foreground until SIGTERM or SIGINT; the exit status.

    Prints `ready http=… grpc=… metrics=…` on stdout once a real token came through the ensemble. Raises ForgeError
    for a damaged repository, an engine that cannot run here or in the image, a port in use, and a server that fails to
    start or ends.
    """
    facts = read_facts(open_to_run(repo, "repository"))
    with runtime_directory() as runtime:
        launch = plan_launch(config, repo, facts, runtime)
        check_versions(facts, launch)
        if config.dry_run:
            print(launch.describe())
            return 0
        check_embedded(facts, repo)
        require_runnable(launch, facts)
        check_gpus(facts, launch)
        require_free_ports(config)
        _run(config, repo, facts, launch, runtime)
    return 0


def require_free_ports(config: ServeConfig) -> None:
    """Raises ForgeError naming the option for a port that another process listens on."""
    if len(set(config.ports.values())) < len(config.ports):
        raise ForgeError("the HTTP, gRPC and metrics ports must differ", hint="Choose three different ports.")
    for name, port in config.ports.items():
        with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                raise ForgeError(
                    f"port in use: {config.host}:{port} ({error.strerror})",
                    hint=f"Stop the process that listens there, or choose another --{name}-port.",
                ) from None


def _run(config: ServeConfig, repo: Path, facts: RepositoryFacts, launch: Launch, runtime: Path) -> None:
    if launch.installation is not None:
        launch.installation.prepare()
    if launch.view is not None:
        make_view(repo, launch.view, facts)
    http, grpc = config.address(config.http_port), config.address(config.grpc_port)
    server = Server(launch, runtime / "triton.log", verbose=config.verbose)
    try:
        with signals_to(server):
            if server.wait_ready(
                lambda left: is_serving(http, grpc, facts.model("ensemble"), left), config.ready_timeout
            ):
                print(f"ready http={http} grpc={grpc} metrics={config.address(config.metrics_port)}", flush=True)
            server.wait(config.drain_timeout)
    finally:
        server.end()
