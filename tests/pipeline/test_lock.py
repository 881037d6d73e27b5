"""A lock pins what a build used; another model, version or image is named, and refused with --locked."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtforge.compile.machine import Machine
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import Recipe
from trtforge.formats.engine_target import EngineTarget, TargetEnvironment
from trtforge.machine.host import Host, RunError
from trtforge.pipeline import lock_facts
from trtforge.pipeline.lock import (
    LockedBuild,
    LockedDataset,
    LockedEngine,
    LockedModel,
    differences,
    pinned,
    pinned_image,
    read_locked,
    repository_of,
    require_locked,
    write_locked,
)
from trtforge.pipeline.lock_facts import what_is_used, with_image

COMMIT, LATER = "0e9e39f249a16976918f6564b8830bc894c89659", "5206a32e0bd3067aef1ce90f5528ade7d866253f"
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
LOCKED = LockedBuild(
    model=LockedModel(source="meta-llama/Llama-3.1-8B", revision="main", commit=COMMIT),
    engine=LockedEngine(
        backend="tensorrt_llm",
        tensorrt_llm="1.2.1",
        tensorrt="10.14.1.48",
        cuda="13.1.0.036",
        image=IMAGE,
        image_digest="sha256:aa",
    ),
    versions={"python": "3.11.2", "trtforge": "0.1.0", "torch": "2.9.0"},
)


def recipe(**model: str) -> Recipe:
    """A recipe for TensorRT-LLM, of a hub model."""
    values = {"source": "meta-llama/Llama-3.1-8B"} | model
    return Recipe.parse({"name": "llama", "model": values, "engine": {"backend": "tensorrt_llm"}}, "test")


NO_DOCKER = Host(environment={"PATH": ""})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the hub has: revisions and their commits; a commit stands for itself."""
    commits = {"main": COMMIT}

    def resolve(source: str, revision: str, *, metadata_only: bool) -> Path:
        assert metadata_only, "the weights are not needed to know the commit"
        return tmp_path / "snapshots" / commits.get(revision, revision)

    monkeypatch.setattr(lock_facts, "resolve_source", resolve)
    return commits


@pytest.fixture
def docker(tmp_path: Path) -> Host:
    """A machine with docker, and the image."""
    (tmp_path / "docker").write_text("")
    (tmp_path / "docker").chmod(0o755)

    def run(command: Sequence[str], timeout: float) -> str:
        assert command[1:3] == ["image", "inspect"]
        assert command[-1] == IMAGE
        return "mirror.example/tritonserver@sha256:bb\nnvcr.io/nvidia/tritonserver@sha256:aa\n"

    return Host(environment={"PATH": str(tmp_path)}, run=run)


def test_lock_file_is_read_back(tmp_path: Path) -> None:
    write_locked(tmp_path / "forge.lock", "llama", LOCKED)
    assert read_locked(tmp_path / "forge.lock", "llama") == LOCKED
    assert read_locked(tmp_path / "forge.lock", "other") is None
    assert read_locked(tmp_path / "none.lock", "llama") is None


def test_a_lock_file_goes_into_a_new_directory(tmp_path: Path) -> None:
    """A missing one would fail the build when all its stages are done."""
    path = tmp_path / "new" / "locks" / "forge.lock"
    write_locked(path, "llama", LOCKED)
    assert read_locked(path, "llama") == LOCKED


def test_lock_file_is_deterministic_and_keeps_other_recipes(tmp_path: Path) -> None:
    path, reverse = tmp_path / "forge.lock", tmp_path / "reverse.lock"
    for name in ("b", "a", "b"):
        write_locked(path, name, LOCKED)
    for name in ("a", "b"):
        write_locked(reverse, name, LOCKED)
    assert path.read_bytes() == reverse.read_bytes()
    assert path.read_text().startswith("# Written by `trtforge build --update-lock`")
    assert "\nrecipes:\n  a:\n    data: {}\n    engine:\n      backend: tensorrt_llm\n" in path.read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["forge.lock", "reverse.lock"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<<<<<<< ours\nversion: 1\n", "not YAML"),
        ("- a list\n", "not a lock file: not a mapping"),
        ("version: 2\nrecipes: {}\n", "written by another version of trtforge"),
        ("version: 1\nreceipes: {}\n", "unknown key receipes"),
        ("version: 1\nrecipes: {a: {model: {source: x}, versions: {}}}\n", r"recipes\.a\.engine is missing"),
        ("version: 1\nrecipes: {a: {engine: {backend: torch, gpu: h100}}}\n", r"recipes\.a\.\w+"),
    ],
)
def test_lock_file_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "forge.lock").write_text(text)
    with pytest.raises(ForgeError, match=message) as caught:
        read_locked(tmp_path / "forge.lock", "a")
    assert str(tmp_path / "forge.lock") in caught.value.message


def test_build_in_a_container_locks_the_image(hub: dict[str, str], docker: Host, tmp_path: Path) -> None:
    found = what_is_used(recipe(), tmp_path / "forge.lock", host=docker)
    assert (found.model, found.engine) == (LOCKED.model, LOCKED.engine)
    assert {"python", "trtforge", "torch", "transformers"} <= set(found.versions)
    assert "modelopt" not in str(found.versions)


def test_without_docker_the_digest_of_the_image_stays_open(hub: dict[str, str], docker: Host, tmp_path: Path) -> None:
    def fail(command: Sequence[str], timeout: float) -> str:
        raise RunError("No such image")

    for host in (NO_DOCKER, Host(environment=docker.environment, run=fail)):
        found = what_is_used(recipe(), tmp_path / "forge.lock", host=host)
        assert (found.engine.image, found.engine.image_digest) == (IMAGE, None)
        assert differences(found, LOCKED.model_copy(update={"versions": found.versions})) == ()


def test_image_that_the_build_pulled_is_locked_with_its_digest(
    hub: dict[str, str], docker: Host, tmp_path: Path
) -> None:
    before = what_is_used(recipe(), tmp_path / "forge.lock", host=NO_DOCKER)
    hub["main"] = LATER
    after = with_image(before, recipe(), host=docker)
    assert (before.engine.image_digest, after.engine.image_digest) == (None, "sha256:aa")
    assert after.model == before.model, "what was built, not what the branch has become since"


def test_installed_tensorrt_llm_is_what_builds(
    hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = EngineTarget(tensorrt_llm="1.2.1", tensorrt="10.14.1.48", cuda="13.1")
    monkeypatch.setattr(lock_facts, "installed", lambda: TargetEnvironment("this machine", offers))
    monkeypatch.setattr(lock_facts, "this_machine", lambda: Machine(tensorrt_llm="1.2.1", gpu=True))
    found = what_is_used(recipe(), tmp_path / "forge.lock").engine
    assert found == LockedEngine(backend="tensorrt_llm", tensorrt_llm="1.2.1", tensorrt="10.14.1.48", cuda="13.1")


def test_image_that_is_asked_for_is_locked(hub: dict[str, str], tmp_path: Path) -> None:
    """Of one that nobody knows, the release that the recipe asks for is all that is known."""
    found = what_is_used(recipe(), tmp_path / "forge.lock", container="mine/builder:3", host=NO_DOCKER).engine
    assert (found.image, found.tensorrt_llm, found.tensorrt) == ("mine/builder:3", "1.2.1", None)
    said = list(map(str, differences(LOCKED, LOCKED.model_copy(update={"engine": found}))))
    assert f"engine.image: locked {IMAGE}, found mine/builder:3" in said


def test_locked_image_is_taken_by_its_content() -> None:
    engine = LOCKED.engine
    assert pinned_image(LOCKED, LOCKED) == f"{IMAGE.rpartition(':')[0]}@sha256:aa"
    open_digest = LOCKED.model_copy(update={"engine": engine.model_copy(update={"image_digest": None})})
    assert pinned_image(open_digest, LOCKED) is None
    elsewhere = LOCKED.model_copy(update={"engine": engine.model_copy(update={"image": "mine/builder:3"})})
    assert pinned_image(LOCKED, elsewhere) is None


def test_the_locked_commit_is_taken_when_the_branch_moved(hub: dict[str, str], docker: Host, tmp_path: Path) -> None:
    hub["main"] = LATER
    assert pinned(recipe(), LOCKED).model.revision == COMMIT
    found = what_is_used(recipe(), tmp_path / "forge.lock", LOCKED, host=docker)
    assert found.model == LOCKED.model
    assert what_is_used(recipe(), tmp_path / "forge.lock", host=docker).model.commit == LATER


@pytest.mark.parametrize("changed", [{"revision": "v2"}, {"source": "meta-llama/Llama-3.2-1B"}])
def test_another_model_or_revision_is_not_pinned(hub: dict[str, str], tmp_path: Path, changed: dict[str, str]) -> None:
    hub["v2"] = LATER
    assert pinned(recipe(**changed), LOCKED) == recipe(**changed)
    found = what_is_used(recipe(**changed), tmp_path / "forge.lock", LOCKED)
    ((field, value),) = changed.items()
    assert f"model.{field}: locked {getattr(LOCKED.model, field)}, found {value}" in map(
        str, differences(LOCKED, found)
    )


@pytest.mark.parametrize(
    ("part", "field", "value", "said"),
    [
        ("model", "commit", LATER, f"model.commit: locked {COMMIT}, found {LATER}"),
        ("engine", "backend", "torch", "engine.backend: locked tensorrt_llm, found torch"),
        ("engine", "tensorrt_llm", "1.1.0", "engine.tensorrt_llm: locked 1.2.1, found 1.1.0"),
        ("engine", "tensorrt", "10.13.3.9", "engine.tensorrt: locked 10.14.1.48, found 10.13.3.9"),
        ("engine", "cuda", "13.0", "engine.cuda: locked 13.1.0.036, found 13.0"),
        ("engine", "image", None, f"engine.image: locked {IMAGE}, found nothing"),
        ("engine", "image_digest", "sha256:bb", "engine.image_digest: locked sha256:aa, found sha256:bb"),
    ],
)
def test_each_difference_is_refused_by_name(
    tmp_path: Path, part: str, field: str, value: str | None, said: str
) -> None:
    found = LOCKED.model_copy(update={part: getattr(LOCKED, part).model_copy(update={field: value})})
    with pytest.raises(ForgeError) as caught:
        require_locked(tmp_path / "forge.lock", "llama", LOCKED, found)
    assert caught.value.message == f"{tmp_path / 'forge.lock'}: llama would not be built as locked: {said}"
    do = "Restore the locked model" if part == "model" else "Install the locked versions"
    assert caught.value.hint == f"{do}, or update the lock with --update-lock."


def test_changed_data_is_to_be_restored_and_other_versions_to_be_installed(tmp_path: Path) -> None:
    found = LOCKED.model_copy(update={"data": {"gate": "b" * 64}})
    with pytest.raises(ForgeError) as caught:
        require_locked(tmp_path / "forge.lock", "llama", LOCKED, found)
    assert caught.value.hint == "Restore the locked data, or update the lock with --update-lock."
    found = found.model_copy(update={"versions": {**LOCKED.versions, "torch": "2.0"}})
    with pytest.raises(ForgeError) as caught:
        require_locked(tmp_path / "forge.lock", "llama", LOCKED, found)
    do = "Restore the locked data, install the locked versions"
    assert caught.value.hint == f"{do}, or update the lock with --update-lock."


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    found = LOCKED.model_copy(update={"versions": {"python": "3.12.3", "trtforge": "0.1.0", "transformers": "5.2.0"}})
    with pytest.raises(ForgeError) as caught:
        require_locked(tmp_path / "forge.lock", "llama", LOCKED, found)
    assert caught.value.message.endswith(
        "as locked: versions.python: locked 3.11.2, found 3.12.3; versions.torch: locked 2.9.0, found nothing; "
        "versions.transformers: locked nothing, found 5.2.0"
    )


DATASET = "hf:abisee/cnn_dailymail:3.0.0:train"


def calibrated(data: str) -> Recipe:
    """The recipe with these samples, for calibration and the gate."""
    plain = recipe()
    samples = plain.quantization.calibration.model_copy(update={"data": data})
    quantization = plain.quantization.model_copy(update={"format": "fp8", "calibration": samples})
    return plain.model_copy(
        update={"quantization": quantization, "gate": plain.gate.model_copy(update={"data": "builtin:stdlib"})}
    )


def test_a_dataset_is_taken_at_its_locked_commit(
    hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "forge.lock", {"commit": COMMIT}
    monkeypatch.setattr(lock_facts, "commit_of", lambda source: COMMIT if COMMIT in source else now["commit"])
    used = what_is_used(calibrated(DATASET), path, host=NO_DOCKER)
    assert used.data == {"calibration": LockedDataset(source=DATASET, commit=COMMIT)}
    write_locked(path, "llama", used)
    now["commit"] = LATER
    locked = read_locked(path, "llama")
    assert locked == used
    at = f"hf:abisee/cnn_dailymail@{COMMIT}:3.0.0:train"
    assert pinned(calibrated(DATASET), locked).quantization.calibration.data == at
    assert pinned(calibrated(DATASET), locked).gate.data == "builtin:stdlib"
    assert what_is_used(calibrated(DATASET), path, locked, host=NO_DOCKER).data == locked.data
    again = what_is_used(calibrated(DATASET), path, host=NO_DOCKER)
    assert f"data.calibration.commit: locked {COMMIT}, found {LATER}" in map(str, differences(locked, again))


@pytest.mark.parametrize("data", ["hf:abisee/cnn_dailymail:3.0.0:test", "hf:abisee/cnn_dailymail@v2:3.0.0:train"])
def test_another_dataset_is_not_pinned(
    hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setattr(lock_facts, "commit_of", lambda source: LATER)
    entry = LockedDataset(source=DATASET, commit=COMMIT)
    locked = LOCKED.model_copy(update={"data": {"calibration": entry}})
    assert pinned(calibrated(data), locked).quantization.calibration.data == data
    found = what_is_used(calibrated(data), tmp_path / "forge.lock", locked, host=NO_DOCKER)
    assert f"data.calibration.source: locked {DATASET}, found {data}" in map(str, differences(locked, found))


def test_a_dataset_that_is_not_read_is_not_asked_for(
    hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(source: str) -> str:
        raise ForgeError("the hub is away", hint="Wait.")

    monkeypatch.setattr(lock_facts, "commit_of", unknown)
    path, reads = tmp_path / "forge.lock", calibrated(DATASET)
    weight_only = reads.model_copy(update={"quantization": reads.quantization.model_copy(update={"format": "int8_wo"})})
    assert what_is_used(weight_only, path, host=NO_DOCKER).data == {}
    assert what_is_used(reads, path, host=NO_DOCKER, contents=False).data == {}
    with pytest.raises(ForgeError, match="the hub is away"):
        what_is_used(reads, path, host=NO_DOCKER)


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3", "nvcr.io/nvidia/tritonserver"),
        ("my/trt", "my/trt"),
        ("localhost:5000/trt", "localhost:5000/trt"),
        ("localhost:5000/trt:3", "localhost:5000/trt"),
        ("trt@sha256:aa", "trt"),
    ],
)
def test_an_images_repository(image: str, name: str) -> None:
    assert repository_of(image) == name


def test_two_builds_at_once_lose_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "forge.lock"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: write_locked(path, f"recipe-{index}", LOCKED), range(24)))
    assert all(read_locked(path, f"recipe-{index}") == LOCKED for index in range(24))
    assert [file.name for file in tmp_path.iterdir()] == ["forge.lock"]
