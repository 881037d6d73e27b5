"""The command that installs an extra is that of the place that trtforge was installed from."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtforge.core import extras
from trtforge.core.extras import install_command, missing_package


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'trtforge[engine]'"),
        ({"url": "file:///opt/my%20tools/trtforge", "dir_info": {}}, "pip install '/opt/my tools/trtforge[engine]'"),
        (
            {"url": "file:///opt/trtforge", "dir_info": {"editable": True}},
            "pip install -e '/opt/trtforge[engine]'",
        ),
        ({"url": "https://example.org/trtforge.whl", "archive_info": {}}, "pip install 'trtforge[engine]'"),
        (
            {"url": "https://example.org/trtforge.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "pip install 'trtforge[engine] @ git+https://example.org/trtforge.git'",
        ),
    ],
)
def test_command(direct_url: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = None if direct_url is None else json.dumps(direct_url)
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert install_command("engine") == command


def test_the_directory_of_the_command_is_left_out_inside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    monkeypatch.chdir(tmp_path)
    assert install_command("hub-data") == "pip install -e '.[hub-data]'"


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
