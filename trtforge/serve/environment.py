"""Environment and file permissions of server processes: no secrets of this user, no access for other users."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

UMASK = 0o077
"""Of server processes: only their user can access the files that they write."""

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
    """This process's environment with `added`, without the variables whose names indicate a secret.

    An allow-list would break GPU, MPI and site setups, whose variables are not all known. A server needs no secret:
    models and tokenizers are in the repository.
    """
    here = os.environ if environment is None else environment
    return {name: value for name, value in here.items() if not holds_secret(name)} | dict(added)


def holds_secret(name: str) -> bool:
    """Whether the name of an environment variable indicates that its value is a secret."""
    return _SECRET.fullmatch(name) is not None and _NOT_SECRET.fullmatch(name) is None


def close_shared_memory(prefix: str) -> None:
    """Set mode 0600 on a server's shared memory: Triton creates it with 0644, whatever the umask."""
    for path in _SHARED_MEMORY.glob(f"{prefix}*"):
        path.chmod(0o600)
