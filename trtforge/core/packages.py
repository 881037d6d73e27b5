"""Installed packages and their versions, without importing them."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from trtforge.core.errors import ForgeError
from trtforge.core.extras import install_command

_OPENAI_MODULES = ("fastapi", "uvicorn", "grpc", "tritonclient", "prometheus_client")


def lacks_openai() -> str | None:
    """The first missing module of the extra `openai`; None if all are installed."""
    return next((name for name in _OPENAI_MODULES if find_spec(name) is None), None)


def require_openai(what: str) -> None:
    """Raises ForgeError if `what` cannot run because packages of the extra `openai` are missing."""
    missing = lacks_openai()
    if missing is not None:
        raise ForgeError(f"{what} needs the package {missing}", hint=f"Run `{install_command('openai')}`.")


def installed_version(package: str) -> str | None:
    """The version of `package`; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_release(package: str) -> str | None:
    """The version without its local part, the CUDA version of a wheel: 1.2.1 for 1.2.1+cu130."""
    found = installed_version(package)
    return None if found is None else release_of(found)


def release_of(version: str) -> str:
    """A version without its local part."""
    return version.partition("+")[0]


def same_minor(one: str, other: str) -> bool:
    """Whether major and minor version are equal: the LLM API's arguments change only between minor versions."""
    return one.split(".")[:2] == other.split(".")[:2]
