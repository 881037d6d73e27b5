"""What was made once is not made again: not elsewhere, not at the same time, and not from a damaged copy."""

import errno
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import eventually
from trtforge.core.artifact import produce
from trtforge.core.cache import Cache, cache_directory, cache_for
from trtforge.core.cache_entry import About
from trtforge.core.cache_prune import list_entries, remove, sweep
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import FileRecord, Identity, open_artifact

ABOUT = About(architecture="LlamaForCausalLM", layers=32, hidden=4096, format="fp8", release="TensorRT-LLM 1.2.1")
FORK = multiprocessing.get_context("fork")
Write = Callable[[Path], dict[str, FileRecord]]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", ABOUT)


def identity(**config: object) -> Identity:
    return Identity(stage="engine", config=config, inputs={"checkpoint": "c"}, versions={"tensorrt": "10.14.1.48"})


def writer(log: Path, text: str = "x") -> Write:
    """Writes a fake engine, and counts in `log` how often."""

    def write(directory: Path) -> dict[str, FileRecord]:
        with log.open("a") as file:
            file.write("made\n")
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "tokenizer.json").write_text("{}")
        (directory / "rank0.engine").write_text(text)
        return {}

    return write


def times_made(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_second_output_comes_from_the_cache(tmp_path: Path, cache: Cache) -> None:
    write = writer(tmp_path / "log")
    first = produce(tmp_path / "a", identity(), write, cache=cache)
    second = produce(tmp_path / "b", identity(), write, cache=cache)

    assert (first.origin, second.origin, second.cached) == ("written", "from the cache", True)
    assert times_made(tmp_path / "log") == 1
    assert (tmp_path / "a/forge.json").read_bytes() == (tmp_path / "b/forge.json").read_bytes()
    assert open_artifact(tmp_path / "b", "engine") == first.manifest
    assert (tmp_path / "b/tokenizer/tokenizer.json").read_text() == "{}"


def test_output_that_is_right_already_is_not_touched(tmp_path: Path, cache: Cache) -> None:
    write = writer(tmp_path / "log")
    produce(tmp_path / "a", identity(), write, cache=cache)
    assert produce(tmp_path / "a", identity(), write, cache=cache).origin == "already right"


@pytest.mark.parametrize(
    "other",
    [
        identity(max_batch_size=8),
        identity().with_inputs({"checkpoint": "d"}),
        identity().model_copy(update={"versions": {"tensorrt": "10.13.3.9"}}),
        identity().model_copy(update={"stage": "calibration"}),
    ],
)
def test_another_identity_is_made(tmp_path: Path, cache: Cache, other: Identity) -> None:
    write = writer(tmp_path / "log")
    produce(tmp_path / "a", identity(), write, cache=cache)
    assert produce(tmp_path / "b", other, write, cache=cache).origin == "written"
    assert len(list_entries(cache.root)) == 2


def test_force_makes_it_again_and_replaces_the_entry(tmp_path: Path, cache: Cache) -> None:
    produce(tmp_path / "a", identity(), writer(tmp_path / "log", "old"), cache=cache)
    produce(tmp_path / "b", identity(), writer(tmp_path / "log", "new"), cache=cache, force=True)
    produce(tmp_path / "c", identity(), writer(tmp_path / "log", "never"), cache=cache)
    assert (tmp_path / "c/rank0.engine").read_text() == "new"
    assert len(list_entries(cache.root)) == 1


def test_editing_an_output_does_not_change_the_cache(tmp_path: Path, cache: Cache) -> None:
    write = writer(tmp_path / "log")
    for name in ("a", "b"):
        produce(tmp_path / name, identity(), write, cache=cache)
        with (tmp_path / name / "rank0.engine").open("a") as file:
            file.write("edited")
    assert produce(tmp_path / "c", identity(), write, cache=cache).origin == "from the cache"
    assert (tmp_path / "c/rank0.engine").read_text() == "x"


def edit(entry: Path) -> None:
    (entry / "artifact/rank0.engine").write_text("y")


def cut(entry: Path) -> None:
    (entry / "artifact/rank0.engine").write_text("")


def lose(entry: Path) -> None:
    (entry / "artifact/rank0.engine").unlink()


def add(entry: Path) -> None:
    (entry / "artifact/more").write_text("y")


def spoil_manifest(entry: Path) -> None:
    (entry / "artifact/forge.json").write_text("{")


def lose_manifest(entry: Path) -> None:
    (entry / "artifact/forge.json").unlink()


def exchange_manifest(entry: Path) -> None:
    path = entry / "artifact/forge.json"
    path.write_text(path.read_text().replace("10.14.1.48", "10.13.3.9"))


@pytest.mark.parametrize(
    "damage",
    [edit, cut, lose, add, spoil_manifest, lose_manifest, exchange_manifest],
    ids=lambda damage: damage.__name__,
)
def test_damaged_entry_is_dropped_and_made_again(
    tmp_path: Path, cache: Cache, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    write = writer(tmp_path / "log")
    made = produce(tmp_path / "a", identity(), write, cache=cache)
    damage(list_entries(cache.root)[0].directory)

    assert produce(tmp_path / "b", identity(), write, cache=cache).origin == "written"
    assert "the cached engine is damaged and is built again" in caplog.text
    again = produce(tmp_path / "c", identity(), write, cache=cache)
    assert (again.origin, again.manifest) == ("from the cache", made.manifest)
    assert times_made(tmp_path / "log") == 2


def test_entry_without_its_record_counts_as_absent(tmp_path: Path, cache: Cache) -> None:
    write = writer(tmp_path / "log")
    produce(tmp_path / "a", identity(), write, cache=cache)
    list_entries(cache.root)[0].record.unlink()
    assert produce(tmp_path / "b", identity(), write, cache=cache).origin == "written"
    assert produce(tmp_path / "c", identity(), write, cache=cache).origin == "from the cache"


def test_what_a_killed_process_left_half_stored_is_no_entry(tmp_path: Path, cache: Cache) -> None:
    write = writer(tmp_path / "log")
    left = cache.root / "artifacts" / identity().digest / ".new" / "artifact"
    left.mkdir(parents=True)
    (left / "rank0.engine").write_text("half")

    assert list_entries(cache.root) == ()
    assert produce(tmp_path / "a", identity(), write, cache=cache).origin == "written"
    assert produce(tmp_path / "b", identity(), write, cache=cache).origin == "from the cache"
    assert (tmp_path / "b/rank0.engine").read_text() == "x"


def _produce(out: Path, cache: Cache, log: Path) -> None:
    produce(out, identity(), writer(log), cache=cache)


def test_eight_builds_at_once_make_it_once(tmp_path: Path, cache: Cache) -> None:
    jobs = [FORK.Process(target=_produce, args=(tmp_path / str(n), cache, tmp_path / "log")) for n in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 8
    assert times_made(tmp_path / "log") == 1
    assert {(tmp_path / str(n) / "rank0.engine").read_text() for n in range(8)} == {"x"}
    assert len(list_entries(cache.root)) == 1


def _hang(out: Path, cache: Cache, ready: Path) -> None:
    def write(directory: Path) -> dict[str, FileRecord]:
        (directory / "rank0.engine").write_text("half")
        ready.touch()
        time.sleep(600)
        return {}

    produce(out, identity(), write, cache=cache)


def _produce_saying(out: Path, cache: Cache, log: Path, said: Path) -> None:
    logging.basicConfig(filename=said, force=True)
    _produce(out, cache, log)


def test_killed_builder_lets_the_next_one_build(tmp_path: Path, cache: Cache) -> None:
    builder = FORK.Process(target=_hang, args=(tmp_path / "a", cache, tmp_path / "ready"), daemon=True)
    builder.start()
    assert eventually((tmp_path / "ready").exists)
    said = tmp_path / "said"
    waiting = FORK.Process(target=_produce_saying, args=(tmp_path / "b", cache, tmp_path / "log", said), daemon=True)
    waiting.start()
    assert eventually(
        lambda: said.exists() and "another process is building this engine: waiting for it" in said.read_text()
    )
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    waiting.join()

    assert waiting.exitcode == 0
    assert times_made(tmp_path / "log") == 1
    assert (tmp_path / "b/rank0.engine").read_text() == "x"
    assert not (tmp_path / "a").exists()


def test_entry_that_a_build_uses_is_not_removed(tmp_path: Path, cache: Cache) -> None:
    produce(tmp_path / "a", identity(), writer(tmp_path / "log"), cache=cache)
    (entry,) = list_entries(cache.root)
    with cache.slot(identity(), dict, afresh=False) as slot:
        assert slot.found == entry
        assert not remove(entry)
        sweep(cache.root)
    assert remove(entry)
    sweep(cache.root)
    assert list((cache.root / "artifacts").iterdir()) == []


def test_failed_build_leaves_no_entry(tmp_path: Path, cache: Cache) -> None:
    def fail(directory: Path) -> dict[str, FileRecord]:
        (directory / "rank0.engine").write_text("half")
        raise ForgeError("out of memory", hint="Use a larger GPU.")

    with pytest.raises(ForgeError, match="out of memory"):
        produce(tmp_path / "a", identity(), fail, cache=cache)
    assert list_entries(cache.root) == ()


def test_late_inputs_decide_which_entry_it_is(tmp_path: Path, cache: Cache) -> None:
    asked: list[str] = []

    def late(weights: str) -> Callable[[], dict[str, str]]:
        def digests() -> dict[str, str]:
            asked.append(weights)
            return {"weights": weights}

        return digests

    write = writer(tmp_path / "log")
    produce(tmp_path / "a", identity(), write, cache=cache, late_inputs=late("one"))
    assert asked == ["one"], "with an empty cache the weights are not read before the work"
    assert produce(tmp_path / "b", identity(), write, cache=cache, late_inputs=late("two")).origin == "written"
    for name, weights in (("c", "one"), ("d", "two")):
        found = produce(tmp_path / name, identity(), write, cache=cache, late_inputs=late(weights))
        assert found.origin == "from the cache"
        assert found.manifest.identity.inputs["weights"] == weights
    assert times_made(tmp_path / "log") == 2


def test_cache_that_cannot_be_written_is_no_failure(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.root.write_text("a file")
    for name in ("a", "b"):
        assert produce(tmp_path / name, identity(), writer(tmp_path / "log"), cache=cache).origin == "written"
    said = [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]
    assert said == [f"the cache {cache.root} cannot be used: Not a directory"], "once, not for each artifact"


def test_a_cache_that_may_only_be_read_is_read(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user, or on a disk that is read-only: lock files cannot be opened to write."""
    produce(tmp_path / "a", identity(), writer(tmp_path / "log"), cache=cache)
    opened = os.open

    def read_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and cache.root in Path(path).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    assert produce(tmp_path / "b", identity(), writer(tmp_path / "log"), cache=cache).origin == "from the cache"


def test_artifact_that_would_fill_the_disk_is_not_kept(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Usage:
        free = 5

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    produce(tmp_path / "a", identity(), writer(tmp_path / "log"), cache=cache)
    assert list_entries(cache.root) == ()
    assert "is not stored in the cache: it would take more than half of the 5 free bytes" in caplog.text


def test_interrupted_copy_into_the_cache_loses_nothing(
    tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trtforge.core.cache.clone_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            produce(tmp_path / "a", identity(), writer(tmp_path / "log"), cache=cache)
    assert open_artifact(tmp_path / "a", "engine").identity == identity()
    assert list_entries(cache.root) == ()
    assert produce(tmp_path / "b", identity(), writer(tmp_path / "log"), cache=cache).origin == "written"


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({}, "/home/me/.cache/trtforge"),
        ({"XDG_CACHE_HOME": "/var/cache/me"}, "/var/cache/me/trtforge"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/trtforge"),
        ({"TRTFORGE_CACHE": "/big/disk", "XDG_CACHE_HOME": "/var/cache/me"}, "/big/disk"),
        ({"TRTFORGE_CACHE": "~/cache"}, "/home/me/cache"),
        ({"TRTFORGE_CACHE": "off"}, None),
        ({"TRTFORGE_CACHE": "None"}, None),
    ],
)
def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], directory: str | None
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("TRTFORGE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == (Path(directory) if directory is not None else None)
    assert (cache_for(ABOUT) is None) == (directory is None)


def test_where_the_cache_is_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delenv("TRTFORGE_CACHE")
    monkeypatch.setenv("HOME", "/Users/me")
    assert cache_directory() == Path("/Users/me/Library/Caches/trtforge")


def test_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TRTFORGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_directory() is None


def test_backup_programs_pass_over_the_cache(tmp_path: Path, cache: Cache) -> None:
    produce(tmp_path / "a", identity(), writer(tmp_path / "log"), cache=cache)
    assert (cache.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
