"""`trtforge cache`, and a build that finds its calibration and engine there."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL
from trtforge.cli.app import app
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.artifact import produce
from trtforge.core.cache import Cache
from trtforge.core.cache_entry import About
from trtforge.core.cache_prune import list_entries
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.manifest import Identity
from trtforge.core.progress import Silent
from trtforge.core.recipe import GateConfig
from trtforge.core.sizes import parse_size
from trtforge.core.timings import list_timings, timings_path
from trtforge.pipeline.adoption import adopt
from trtforge.pipeline.verification import verified

ABOUT = About(architecture="LlamaForCausalLM", layers=32, hidden=4096, format="W4A16_AWQ", release="TensorRT-LLM 1.2.1")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache for one test."""
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add_entry(root: Path, name: str, days: float, size: int) -> str:
    """An engine in the cache, last used so many days ago; its key."""
    identity = Identity(stage="engine", config={"name": name})

    def write(directory: Path) -> dict:
        (directory / "rank0.engine").write_bytes(b"w" * size)
        return {}

    produce(root.parent / name, identity, write, cache=Cache(root, ABOUT))
    record = next(entry for entry in list_entries(root) if entry.key == identity.digest).record
    os.utime(record, (time.time() - days * 86400,) * 2)
    return identity.digest


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_says_what_is_there(root: Path) -> None:
    add_entry(root, "old", 3, 2_000)
    new = add_entry(root, "new", 0, 1_000)
    found = json.loads(run("cache", "list", "--json"))
    assert (found["directory"], found["bytes"]) == (str(root), 3_000)
    assert [entry["bytes"] for entry in found["entries"]] == [1_000, 2_000]
    assert found["entries"][0] == {
        "key": new,
        "kind": "engine",
        "bytes": 1_000,
        "last_used": found["entries"][0]["last_used"],
        "about": {
            "architecture": "LlamaForCausalLM",
            "layers": 32,
            "hidden": 4096,
            "format": "W4A16_AWQ",
            "kv_cache": None,
            "release": "TensorRT-LLM 1.2.1",
        },
    }


def test_list_is_readable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    key = add_entry(root, "old", 3, 2_000)
    shown = run("cache", "list")
    assert "1 entry, 2 kB" in shown
    for word in (key[:12], "3 days ago", "LlamaForCausalLM, 32 layers of 4096, W4A16_AWQ, TensorRT-LLM 1.2.1"):
        assert word in shown


def test_prune_removes_what_was_not_used_for_a_month(root: Path) -> None:
    old, new = add_entry(root, "old", 31, 2_000), add_entry(root, "new", 29, 1_000)
    found = json.loads(run("cache", "prune", "--json"))
    assert [entry["key"] for entry in found["removed"]] == [old]
    assert (found["bytes"], found["in_use"], found["dry_run"]) == (2_000, [], False)
    assert [entry.key for entry in list_entries(root)] == [new]


@pytest.mark.parametrize(
    ("arguments", "stays"),
    [
        (["--older-than", "2"], ["c"]),
        (["--max-size", "2kB"], ["b", "c"]),
        (["--older-than", "20", "--max-size", "1.5kB"], ["c"]),
        (["--all"], []),
    ],
)
def test_prune_keeps_what_was_last_used(root: Path, arguments: list[str], stays: list[str]) -> None:
    keys = {name: add_entry(root, name, days, 1_000) for name, days in (("a", 9), ("b", 3), ("c", 1))}
    dry = run("cache", "prune", "--dry-run", *arguments)
    assert f"{'1 entry' if len(stays) == 2 else f'{3 - len(stays)} entries'} with" in dry
    assert "would be removed" in dry
    assert len(list_entries(root)) == 3

    run("cache", "prune", *arguments)
    assert {entry.key for entry in list_entries(root)} == {keys[name] for name in stays}


def test_timings_go_by_age_and_with_all(root: Path) -> None:
    for name, days in (("tensorrt-10.9-sm-90-H100", 40), ("tensorrt-10.14-sm-90-H100", 3)):
        path = timings_path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"timed")
        os.utime(path, (time.time() - days * 86400,) * 2)
    listed = json.loads(run("cache", "list", "--json"))
    assert [each["name"] for each in listed["timings"]] == ["tensorrt-10.14-sm-90-H100", "tensorrt-10.9-sm-90-H100"]
    assert listed["bytes"] == 10
    assert "tensorrt-10.9-sm-90-H100, 5 B" in run("cache", "prune", "--dry-run")
    assert len(list_timings(root)) == 2
    assert json.loads(run("cache", "prune", "--max-size", "0", "--json"))["timings"] == []
    assert json.loads(run("cache", "prune", "--json"))["bytes"] == 5
    assert [each.name for each in list_timings(root)] == ["tensorrt-10.14-sm-90-H100"]
    drafts = [timings_path(root, "x").with_name(f".x.cache.{number}") for number in (1, 2)]
    for path, days in zip(drafts, (2, 0), strict=True):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - days * 86400,) * 2)
    run("cache", "prune")
    assert [path.exists() for path in drafts] == [False, True]
    run("cache", "prune", "--all")
    assert list_timings(root) == ()


def test_prune_leaves_what_a_build_uses(root: Path) -> None:
    key = add_entry(root, "a", 50, 1_000)
    identity = Identity(stage="engine", config={"name": "a"})
    with Cache(root, ABOUT).slot(identity, dict, afresh=False):
        shown = run("cache", "prune", "--all")
    assert f"in use: {key[:12]} engine" in shown
    assert "0 entries with 0 B removed" in shown
    assert len(list_entries(root)) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500", 500),
        ("2kB", 2_000),
        ("1.5 GB", 1_500_000_000),
        ("64GiB", 64 << 30),
        ("64Gi", 64 << 30),
        ("1t", 10**12),
        ("3m", 3_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--max-size") == size


@pytest.mark.parametrize("text", ["", "many", "-5GB", "5XB", "5 GBB", "1,5TB", "1.5.TB", "16GB/day", "50%"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-size .*not a size"):
        parse_size(text, "--max-size")


def test_all_excludes_other_limits(root: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "prune", "--all", "--max-size", "5GB"])
    assert isinstance(result.exception, UsageError)
    assert "--all with --older-than or --max-size" in result.exception.message


def test_a_cache_that_is_off_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTFORGE_CACHE", "off")
    for command in ("list", "prune"):
        assert run("cache", command) == "no cache: it is off (TRTFORGE_CACHE)\n"
        found = json.loads(run("cache", command, "--json"))
        assert (found["directory"], found["timings"], found["bytes"]) == (None, [], 0)


def test_a_cache_that_is_a_file_or_unreadable_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.write_text("")
    with pytest.raises(ForgeError, match=f"the cache {root} is a file"):
        run("cache", "list")
    root.unlink()
    (root / "artifacts").mkdir(parents=True)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    with pytest.raises(
        ForgeError, match=f"the cache {root} cannot be read: {root}/artifacts: Permission denied"
    ) as caught:
        run("cache", "list")
    assert caught.value.hint == "Be the user who may do that, or set TRTFORGE_CACHE to another directory."


def test_second_build_takes_calibration_and_engine_from_the_cache(root: Path) -> None:
    calibrating = ["--quant", "int4_awq", "--samples", "2", "--seq-len", "16", "--json", "--quiet"]
    made = {}
    for name in ("one", "two"):
        out = root.parent / name
        calibration = json.loads(run("calibrate", str(DEMO_MODEL), str(out / "calibration"), *calibrating))
        calibrated = ["--quant", "int4_awq", "--calibration", str(out / "calibration")]
        run("convert", str(DEMO_MODEL), str(out / "checkpoint"), *calibrated, "--json")
        engine = json.loads(run("compile", str(out / "checkpoint"), str(out / "engine"), "--json"))
        made[name] = [(stage["origin"], stage["cached"], stage["digest"]) for stage in (calibration, engine)]
    assert [origin for origin, _, _ in made["one"]] == ["written", "written"]
    assert made["two"] == [("from the cache", True, digest) for _, _, digest in made["one"]]

    entries = {entry.stage: entry.about for entry in list_entries(root)}
    assert (entries["calibration"].format, entries["calibration"].release) == ("int4_awq", None)
    assert (entries["engine"].format, entries["engine"].release) == ("W4A16_AWQ", "torch")
    assert str(entries["engine"]) == "LlamaForCausalLM, 4 layers of 256, W4A16_AWQ, torch"


def test_a_build_elsewhere_takes_the_verification_of_the_same_checkpoint(root: Path) -> None:
    """Of other engines and other settings of serving too; of other samples it does not."""

    def built(name: str, *options: str) -> tuple[dict[str, str], float]:
        gate = ["--set", "gate.data=builtin:stdlib", "--set", "gate.sequence_length=16", "--set", "gate.samples=1"]
        out = ["--out", str(root.parent / name), "--json", "--quiet"]
        found = json.loads(run("build", "demo-fp32", *gate, *options, *out))
        return {stage["stage"]: stage["origin"] for stage in found["stages"]}, found["verification"]["kl_mean"]

    first, kl_mean = built("one")
    assert (first["verify"], first["compile"]) == ("written", "written")
    other = ["--set", "serving.max_queue_size=7", "--set", "engine.max_batch_size=3"]
    second, same = built("two", *other)
    assert (second["verify"], second["compile"], same) == ("from the cache", "written", kl_mean)
    assert built("two", *other)[0]["verify"] == "already right"
    assert built("three", "--set", "gate.samples=2")[0]["verify"] == "written"
    assert built("four", "--force")[0]["verify"] == "written"
    about = next(entry.about for entry in list_entries(root) if entry.stage == "verification")
    assert str(about) == "LlamaForCausalLM, 4 layers of 256, float32"


def test_the_verification_of_a_foreign_checkpoint_stays_where_it_is(root: Path, tmp_path: Path) -> None:
    """Its digest does not say which model it was made from."""
    checkpoint = convert(ConvertConfig(), DEMO_MODEL, tmp_path / "checkpoint").path
    (checkpoint / "forge.json").unlink()
    adopt(checkpoint)
    gate = GateConfig(data="builtin:stdlib", samples=1, sequence_length=16)
    for name in ("one", "two"):
        _, origin = verified(checkpoint, lambda: DEMO_MODEL, gate, tmp_path / name, force=False, progress=Silent())
        assert origin == "written"
    assert list_entries(root) == ()


def test_a_cache_that_cannot_be_changed_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_entry(root, "a", 40, 1_000)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("trtforge.core.cache_prune.take_free_lock", refuse)
    with pytest.raises(ForgeError, match=f"the cache {root} cannot be changed: .*: Permission denied") as caught:
        run("cache", "prune", "--all")
    assert caught.value.hint == "Be the user who may do that, or set TRTFORGE_CACHE to another directory."
