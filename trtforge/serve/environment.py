"""The environment and the files of server processes: without this user's secrets, closed to other users."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

UMASK = 0o077
"""Of the server process: what it writes is its user's alone."""

_SHARED_MEMORY = Path("/dev/shm")
_SECRET = re.compile(
    r"""(?:.*_)?(?:TOKEN|TOKENS|CREDENTIAL|CREDENTIALS)(?:_.*)?
    |.*(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY).*
    |(?:.*_)?(?:API|ACCESS|PRIVATE|AUTH|SIGNING|ENCRYPTION|ACCOUNT|SERVICE|LICENSE)_?KEY(?:_.*)?
    |(?:AWS|AZURE|GITHUB|GITLAB|HF_HUB|HUGGING_?FACE|WANDB|NGC|DOCKER_AUTH|KUBE|VAULT|GOOGLE_APPLICATION)_.*
    |.*_(?:PAT|DSN|CONNECTION_STRING|AUTH)|(?:DATABASE|REDIS|MONGO|POSTGRES|AMQP)\w*_UR[IL]|NETRC|SSH_AUTH_SOCK""",
    re.VERBOSE | re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"TOKENIZERS_.*|.*_MAX_\w*TOKENS?|.*MAX_NUM_TOKENS", re.IGNORECASE)


def server_environment(added: Mapping[str, str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with `added`, without the variables whose names say that they hold a secret.

    A list of what may stay would break GPUs, MPI and site set-ups, whose variables nobody knows in full. A server
    needs no secret: models and tokenizers are in the repository.
    """
    here = os.environ if environment is None else environment
    return {name: value for name, value in here.items() if not holds_secret(name)} | dict(added)


def holds_secret(name: str) -> bool:
    """Whether the name of an environment variable says that its value is a secret."""
    return _SECRET.fullmatch(name) is not None and _NOT_SECRET.fullmatch(name) is None


def close_shared_memory(prefix: str) -> None:
    """Mode 0600 for the shared memory of a server: Triton makes it 0644 whatever the umask is."""
    for path in _SHARED_MEMORY.glob(f"{prefix}*"):
        path.chmod(0o600)
