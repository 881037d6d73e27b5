"""Versions of installed packages, without importing them."""

from importlib.metadata import PackageNotFoundError, version


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
