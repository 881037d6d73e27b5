"""Checks whether this machine can run a recipe, or the embedded engine in general."""

from collections.abc import Iterator

from trtforge.doctor.finding import Finding, Report
from trtforge.doctor.gpu_checks import gpu_findings
from trtforge.doctor.memory_checks import memory_findings
from trtforge.doctor.needs import Needs
from trtforge.doctor.package_checks import package_findings
from trtforge.doctor.serving_checks import Serving, serves_in_container, serving_findings
from trtforge.machine.host import Host


def examine(host: Host, needs: Needs, serving: Serving, image: str | None = None) -> Report:
    """All findings. Runs no program except `docker info` and writes nothing."""
    return Report(needs.recipe, tuple(_findings(host, needs, serving, image)))


def _findings(host: Host, needs: Needs, serving: Serving, image: str | None) -> Iterator[Finding]:
    yield from gpu_findings(host, needs)
    yield from memory_findings(host, needs, in_container=serves_in_container(host, needs))
    yield from serving_findings(host, needs, serving, image)
    yield from package_findings(host, needs)
