"""Warnings before a server starts: exposure to clients (gRPC without keys, any host name, known vulnerabilities)."""

import logging

from trtforge.core.api_keys import read_key_file, readable_by_others
from trtforge.core.host_check import unheeded_names
from trtforge.formats import triton_holes
from trtforge.serve.config import ServeConfig
from trtforge.serve.launchers import Launch

_LOG = logging.getLogger(__name__)


def check_doors(config: ServeConfig, launch: Launch) -> None:
    """Raises ForgeError for an invalid key file; logs warnings about what stays exposed."""
    if config.api_key_file is not None:
        read_key_file(config.api_key_file)
        if readable_by_others(config.api_key_file):
            _LOG.warning("other users can read the API keys: chmod 600 %s", config.api_key_file)
        _LOG.warning("API keys are checked over HTTP only; gRPC listens on %s without keys", config.grpc_host)
    keys = config.api_key_file is not None
    if (unheeded := unheeded_names(config.host, config.allowed_hosts, with_keys=keys)) is not None:
        _LOG.warning(unheeded)
    if (warning := hole_warning(config, launch)) is not None:
        _LOG.warning(warning)


def hole_warning(config: ServeConfig, launch: Launch) -> str | None:
    """A warning about known vulnerabilities of the server to start that clients can reach; None if there are none."""
    release = launch.container.triton if launch.container is not None else None
    if release is None and launch.installation is not None:
        release = launch.installation.release
    if release is None:
        return None
    return triton_holes.hole_warning(release, front=launch.front is not None, opened=config.open)
