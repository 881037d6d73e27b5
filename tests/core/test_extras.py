"""The extra of a missing package, and the command that installs it."""

import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from trtforge.core.extras import install_command, missing_package


def test_pip_adds_the_packages_of_an_extra_and_keeps_trtforge() -> None:
    """Whatever it was installed from, such as a file that is gone or a commit of a repository."""
    command = install_command("hub-data")
    assert command == "pip install 'trtforge[hub-data]'"
    pip = [sys.executable, "-m", *shlex.split(command), "--no-index", "--no-deps", "--dry-run"]
    done = subprocess.run(pip, capture_output=True, text=True, check=True, timeout=120)
    assert "Requirement already satisfied: trtforge[hub-data]" in done.stdout


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("torch", "torch", "engine"),
        ("numpy.core", "numpy", "engine"),
        ("tritonclient.grpc", "tritonclient", "serve"),
        ("grpc", "tritonclient", "serve"),
        ("h11", "h11", "serve"),
        ("pyarrow", "pyarrow", "calibrate"),
        ("datasets", "datasets", "hub-data"),
        ("xgrammar", "xgrammar", "guided"),
        ("prometheus_client", "prometheus-client", "openai"),
    ],
)
def test_the_smallest_extra_with_a_package_is_proposed(module: str, package: str, extra: str) -> None:
    failure = missing_package(ModuleNotFoundError("no module", name=module), "trtforge build")
    assert failure is not None
    assert failure.message == f"trtforge build needs the package {package}, which is not installed"
    assert failure.hint == f"Run `{install_command(extra)}`."


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="trtforge.nothing"), ModuleNotFoundError("x")])
def test_other_modules_are_none_of_the_extras(error: ModuleNotFoundError) -> None:
    assert missing_package(error, "trtforge build") is None


def test_a_package_whose_version_is_asked_for_counts_as_missing() -> None:
    failure = missing_package(metadata.PackageNotFoundError("transformers"), "trtforge build")
    assert failure is not None
    assert "the package transformers" in failure.message


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (("generate", "engine", "hello"), "torch", "engine"),
        (("convert", "recipes/demo-model", "{out}"), "numpy", "engine"),
        (("infer", "hello"), "tritonclient", "serve"),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    arguments: tuple[str, ...], package: str, extra: str, tmp_path: Path
) -> None:
    words = [word.format(out=tmp_path / "out") for word in arguments]
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['trtforge', *{words!r}]; "
        "from trtforge.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        f"error: trtforge {words[0]} needs the package {package}, which is not installed",
        f"hint: Run `{install_command(extra)}`.",
    ]


def test_the_python_api_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import trtforge; trtforge.Engine"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = f"trtforge.Engine needs the package torch, which is not installed. Run `{install_command('engine')}`."
    assert done.stderr.splitlines()[-1] == f"ImportError: {said}"
