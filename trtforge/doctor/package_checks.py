"""The Python packages of this environment: which are installed, and which are incompatible."""

from collections.abc import Iterator

from trtforge.core.extras import PROJECT, install_command
from trtforge.doctor.finding import Finding, Status
from trtforge.doctor.needs import Model, Needs
from trtforge.doctor.versions import at_least, numbers, requirements
from trtforge.formats.releases import containers_of
from trtforge.machine.host import Host, Packages

_SHOWN = (
    "torch",
    "transformers",
    "tritonclient",
    "nvidia-pytriton",
    "tensorrt-llm",
    "tensorrt",
    "nvidia-modelopt",
    "mpi4py",
)
_EXTRAS: dict[str, Status] = {"engine": "problem", "serve": "warning"}
"""Status if packages of an extra are missing: the embedded engine needs `engine`, a server `serve`."""

_ESSENTIAL = (PROJECT, "torch", "transformers", "tritonclient", "nvidia-pytriton")


def package_findings(host: Host, needs: Needs) -> Iterator[Finding]:
    """Findings for each relevant package, then for incomplete extras and incompatible pairs."""
    packages = host.packages
    missing = _missing(packages)
    named = {name for names in missing.values() for name in names}
    for name in _SHOWN:
        if name not in named:
            yield _package(packages, name)
    for extra, names in missing.items():
        found = f"{', '.join(names)} not installed"
        yield Finding(f"{PROJECT}[{extra}]", _EXTRAS[extra], found, install_command(extra))
    yield from _conflicts(packages)
    yield from _model(packages, needs)
    yield from _release(packages, needs)


def _package(packages: Packages, name: str) -> Finding:
    version = packages.version(name)
    if name == "torch" and version is not None:
        cuda = packages.cuda_of_torch()
        return Finding(name, "ok", f"{version}, {f'CUDA {cuda}' if cuda else 'CPU only'}")
    return Finding(name, "ok", version or "not installed")


def _missing(packages: Packages) -> dict[str, list[str]]:
    """Missing packages of trtforge's own engine and server, by extra, without repetition."""
    lines = packages.requires(PROJECT)
    missing: dict[str, list[str]] = {}
    for extra in _EXTRAS:
        known = {name for names in missing.values() for name in names}
        wanted = {requirement.name for requirement in requirements(lines, (extra,))} - known
        absent = sorted(name for name in wanted if packages.version(name) is None)
        if absent:
            missing[extra] = absent
    return missing


def _conflicts(packages: Packages) -> Iterator[Finding]:
    """Pairs of installed packages of which one requires another version of the other."""
    for package in (PROJECT, *_SHOWN):
        version = packages.version(package)
        if version is None:
            continue
        wanted = requirements(packages.requires(package), _EXTRAS if package == PROJECT else ())
        for requirement in dict.fromkeys(wanted):
            other = packages.version(requirement.name)
            if other is None or requirement.takes(other):
                continue
            name = f"{requirement.name} with {package}"
            found = f"{package} {version} needs {requirement.name} {requirement.bounds}; {other} is installed"
            if package in _ESSENTIAL:
                yield Finding(name, "problem", found, f"pip install '{requirement.name}{requirement.bounds}'")
            else:
                yield Finding(name, "warning", found, f"Install {package} in a separate environment or container.")


def _model(packages: Packages, needs: Needs) -> Iterator[Finding]:
    if needs.recipe is None:
        return
    model, installed = needs.model, packages.version("transformers")
    if model is None:
        yield Finding("model", "unknown", f"{needs.source} is not on this machine; the build fetches it")
    elif not isinstance(model, Model):
        yield Finding("model", "problem", model.message, model.hint)
    elif installed and model.transformers and not at_least(installed, _minor(model.transformers)):
        found = f"{model.architecture} was saved by transformers {model.transformers}, {installed} is installed"
        yield Finding(
            "model", "warning", found, f"If it does not load: pip install 'transformers>={model.transformers}'"
        )
    else:
        yield Finding("model", "ok", f"{model.architecture}, {model.parameters:,} parameters")


def _minor(version: str) -> str:
    """The minor release; its patch releases can read one another's configurations."""
    return ".".join(map(str, numbers(version)[:2]))


def _release(packages: Packages, needs: Needs) -> Iterator[Finding]:
    """Compares the installed TensorRT-LLM and TensorRT with those that serve the recipe's release."""
    if needs.release is None:
        return
    wanted, installed = needs.release.version, packages.version("tensorrt-llm")
    if installed is not None and numbers(installed) != numbers(wanted):
        todo = f"Build in the container of {wanted}, or install tensorrt-llm=={wanted}."
        found = f"the recipe's engine is for {wanted}; {installed} is installed"
        yield Finding("tensorrt-llm with the recipe", "warning", found, todo)
    containers, tensorrt = containers_of(needs.release), packages.version("tensorrt")
    if containers and tensorrt is not None and numbers(tensorrt) != numbers(containers[0].tensorrt):
        image = containers[0]
        found = f"{image.image_tag} has TensorRT {image.tensorrt}, which engines must match; {tensorrt} is installed"
        yield Finding("tensorrt with the container", "warning", found, "Build engines in the image that serves them.")
