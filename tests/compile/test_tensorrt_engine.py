"""TensorRT-LLM engines, built with a stand-in for TensorRT-LLM that has its recorded signatures."""

import json
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine
from tests.compile.trtllm import H100, L4, MACHINE, Trtllm, write_checkpoint
from trtforge.compile.machine import Machine
from trtforge.compile.stage import CompileOptions, compile_engine, plan_engine
from trtforge.core.artifact import Produced
from trtforge.core.cache_prune import list_entries
from trtforge.core.errors import ForgeError, LoggedError
from trtforge.core.manifest import open_artifact
from trtforge.core.recipe import EngineConfig
from trtforge.formats.engine_target import EngineTarget
from trtforge.formats.trtllm import read_engine_config


def build(
    tmp_path: Path, *, workers: int = 1, machine: Machine = MACHINE, config: EngineConfig | None = None, **rest: Any
) -> Produced:
    config = config or engine(backend="tensorrt_llm", max_batch_size=8, max_seq_len=4096)
    options = CompileOptions(workers=workers)
    return compile_engine(config, tmp_path / "checkpoint", tmp_path / "engine", options, machine=machine, **rest)


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_engine_of_one_rank(tmp_path: Path, trtllm: Trtllm) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    made = build(tmp_path)
    assert not made.cached
    assert sorted(files(made.path)) == ["config.json", "forge.json", "rank0.engine", "tokenizer/tokenizer.json"]
    assert (made.path / "rank0.engine").read_bytes() == b"engine of rank 0"
    assert [call["call"] for call in trtllm.calls()] == ["from_checkpoint", "build", "timings", "save"]
    assert trtllm.calls("from_checkpoint")[0]["ckpt_dir"] == str(checkpoint)
    _, config = read_engine_config(made.path)
    assert config["version"] == "1.2.1"
    assert config["build_config"]["max_batch_size"] == 8
    assert config["build_config"]["plugin_config"]["use_paged_context_fmha"] is True


def test_the_manifest_says_what_the_engine_was_built_with(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    manifest = open_artifact(build(tmp_path).path, "engine")
    assert EngineTarget.recorded(manifest.identity.versions) == EngineTarget(
        tensorrt_llm="1.2.1", tensorrt="10.14.1.48", cuda="13.0", sm="90", gpu="NVIDIA H100 80GB HBM3"
    )
    assert manifest.identity.inputs == {
        "checkpoint": open_artifact(tmp_path / "checkpoint", "checkpoint").digest,
    }
    assert str(tmp_path) not in manifest.to_json()


def test_nothing_of_this_machine_is_in_the_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    engine_directory = build(tmp_path, workers=2).path
    for name, content in files(engine_directory).items():
        assert str(tmp_path).encode() not in content, name
    assert names(tmp_path) == ["cache", "checkpoint", "engine", "engine.logs", "site"]


def test_every_rank_has_a_log_beside_the_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    build(tmp_path)
    assert names(tmp_path / "engine.logs") == ["rank0.log", "rank1.log"]
    assert "[TRT-LLM] [I] Build TensorRT engine" in (tmp_path / "engine.logs/rank1.log").read_text()


@pytest.mark.parametrize("version", ["0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1"])
def test_every_release_takes_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm, version: str
) -> None:
    """The stand-in refuses any key that the release does not have, and a missing one that its loader requires."""
    Trtllm.install(trtllm.site, version)
    write_checkpoint(tmp_path / "checkpoint")
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": version})
    build(tmp_path, machine=Machine(tensorrt_llm=version, gpu=True), config=config)
    given = trtllm.calls("build")[0]["build_config"]
    assert given["kv_cache_type"] == "PAGED"
    assert given["input_timing_cache"] == given["output_timing_cache"] == "model.cache"


def test_one_worker_builds_one_rank_after_the_other(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2, pp=2)
    build(tmp_path, workers=1)
    order = [(call["call"], call["rank"]) for call in trtllm.calls() if call["call"] in ("build", "save")]
    assert order == [(call, rank) for rank in range(4) for call in ("build", "save")]
    assert {call["gpu"] for call in trtllm.calls("build")} == {"0"}


def test_workers_build_side_by_side_each_on_a_gpu_of_its_own(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2, pp=2)
    trtllm.behaves(waits_for={"0": "begun-1", "1": "begun-0"})  # each ends only if the other runs
    build(tmp_path, workers=2)
    assert {call["rank"]: call["gpu"] for call in trtllm.calls("build")} == {0: "0", 1: "1", 2: "0", 3: "1"}


def test_there_are_never_more_workers_than_gpus(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=4)
    build(tmp_path, workers=8)
    assert {call["rank"]: call["gpu"] for call in trtllm.calls("build")} == {0: "0", 1: "1", 2: "0", 3: "1"}


def test_the_gpus_are_those_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm) -> None:
    trtllm.has_gpus(*[L4] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    made = build(tmp_path, workers=2)
    assert {call["rank"]: call["gpu"] for call in trtllm.calls("build")} == {0: "3", 1: "1"}
    assert made.manifest.identity.versions["sm"] == "89"


def test_a_second_build_is_a_cache_hit(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    first = build(tmp_path)
    trtllm.forget()
    second = build(tmp_path)
    assert second.cached
    assert second.manifest == first.manifest
    assert trtllm.calls() == []


def test_an_engine_elsewhere_comes_from_the_cache(tmp_path: Path, trtllm: Trtllm) -> None:
    """Of another directory; not of another release's or GPU's."""
    write_checkpoint(tmp_path / "checkpoint")
    first = build(tmp_path)
    trtllm.forget()
    (tmp_path / "engine").rename(tmp_path / "moved")
    again = build(tmp_path)
    assert again.origin == "from the cache"
    assert trtllm.calls("build") == []
    assert again.manifest == first.manifest


def test_a_cache_hit_leaves_no_empty_directory_of_logs(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    build(tmp_path)
    shutil.rmtree(tmp_path / "engine.logs")
    assert build(tmp_path).cached
    assert not (tmp_path / "engine.logs").exists()


def test_builds_of_one_engine_side_by_side_are_one_build(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    made: list[Produced] = []
    threads = [threading.Thread(target=lambda: made.append(build(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.cached for each in made) == [False, True, True, True]
    assert len(trtllm.calls("build")) == 1


def test_builds_into_many_directories_are_one_build(tmp_path: Path, trtllm: Trtllm) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    config = engine(backend="tensorrt_llm", max_batch_size=8, max_seq_len=4096)
    made: list[Produced] = []

    def run(out: Path) -> None:
        made.append(compile_engine(config, checkpoint, out, machine=MACHINE))

    threads = [threading.Thread(target=run, args=(tmp_path / str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.origin for each in made) == ["from the cache"] * 7 + ["written"]
    assert len(trtllm.calls("build")) == 1
    assert len({each.manifest.digest for each in made}) == 1
    (entry,) = list_entries(tmp_path / "cache")
    assert entry.about.release == "TensorRT-LLM 1.2.1"


def test_engine_of_another_gpu_is_not_taken_from_the_cache(tmp_path: Path, trtllm: Trtllm) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    config = engine(backend="tensorrt_llm", max_batch_size=8, max_seq_len=4096)
    build(tmp_path)
    trtllm.has_gpus(L4)
    assert compile_engine(config, checkpoint, tmp_path / "other", machine=MACHINE).origin == "written"


def test_another_gpu_is_another_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    build(tmp_path)
    trtllm.has_gpus(L4)
    again = build(tmp_path)
    assert not again.cached
    assert again.manifest.identity.versions["gpu"] == "NVIDIA L4"


def test_the_first_rank_that_fails_ends_the_others(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(waits_for={"0": "never", "1": "begun-0"}, fails={"1": "[TRT] [E] out of something"})
    with pytest.raises(LoggedError, match="rank 1 ended with status 1") as caught:
        build(tmp_path, workers=2)
    assert caught.value.log == tmp_path / "engine.logs/rank1.log"
    assert "RuntimeError: Engine building failed" in caught.value.log.read_text()
    assert [call["rank"] for call in trtllm.calls("save")] == []
    for call in trtllm.calls("build"):
        assert not Path(f"/proc/{call['pid']}").exists()
    assert names(tmp_path) == ["cache", "checkpoint", "engine.logs", "site"]


def test_finished_ranks_stay_and_the_rest_is_built_by_the_next_run(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=4)
    trtllm.behaves(fails={"2": "no"})
    with pytest.raises(LoggedError, match="rank 2"):
        build(tmp_path)
    assert sorted(files(tmp_path / ".engine.partial")) == [
        ".finished.json",
        "config.json",
        "rank0.engine",
        "rank1.engine",
    ]
    trtllm.behaves()
    trtllm.forget()
    resumed = build(tmp_path)
    assert [call["rank"] for call in trtllm.calls("build")] == [2, 3]
    whole = files(resumed.path)
    build(tmp_path, force=True)
    assert files(tmp_path / "engine") == whole


def test_a_failure_leaves_the_engine_that_was_there(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    before = files(build(tmp_path).path)
    trtllm.behaves(fails={"0": "no"})
    with pytest.raises(LoggedError):
        build(tmp_path, config=engine(backend="tensorrt_llm", max_batch_size=4))
    assert files(tmp_path / "engine") == before


def test_a_killed_rank_is_said_to_be_killed_in_its_log(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.behaves(kills_itself={"0": True})
    with pytest.raises(LoggedError, match="rank 0 was ended by signal 9") as caught:
        build(tmp_path)
    assert caught.value.log.read_text().splitlines()[-1] == "rank 0 exited on signal 9 (Killed)"


def test_an_interruption_ends_the_ranks_and_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(waits_for={"1": "never"})
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        if (trtllm.site / "begun-1").exists():
            monkeypatch.undo()
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr("trtforge.compile.jobs.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path)
    (pid,) = {call["pid"] for call in trtllm.calls("build") if call["rank"] == 1}
    assert not Path(f"/proc/{pid}").exists()
    assert sorted(files(tmp_path / ".engine.partial")) == [".finished.json", "config.json", "rank0.engine"]


def test_a_build_in_a_thread_leaves_signals_alone(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    made: list[Produced] = []
    thread = threading.Thread(target=lambda: made.append(build(tmp_path)))
    thread.start()
    thread.join()
    assert made[0].path == tmp_path / "engine"


def test_timings_are_kept_between_builds(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    build(tmp_path, workers=2)
    build(tmp_path, workers=2, force=True)
    assert [call["read"] for call in trtllm.calls("timings")] == ["", "", "timed ", "timed "]
    kept = tmp_path / "cache/timing/tensorrt-10.14.1.48-sm-90-NVIDIA-H100-80GB-HBM3.cache"
    assert kept.read_bytes() == b"timed timed "
    trtllm.has_gpus(L4)
    trtllm.forget()
    build(tmp_path)
    assert trtllm.calls("timings")[0]["read"] == ""


def test_a_rank_reads_the_timings_of_those_before_it(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    build(tmp_path, workers=1)
    assert [call["read"] for call in trtllm.calls("timings")] == ["", "timed "]


def test_timings_are_not_kept_where_the_cache_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm
) -> None:
    monkeypatch.setenv("TRTFORGE_CACHE", "off")
    write_checkpoint(tmp_path / "checkpoint")
    build(tmp_path)
    build(tmp_path, force=True)
    assert [call["read"] for call in trtllm.calls("timings")] == ["", ""]
    assert not (tmp_path / "cache").exists()


def test_another_release_than_the_target(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    Trtllm.install(trtllm.site, "1.2.0")
    with pytest.raises(ForgeError, match=r"this machine has TensorRT-LLM 1\.2\.0, the engine is for 1\.2\.1") as caught:
        build(tmp_path)
    assert "--target-version 1.2.0" in caught.value.hint


def test_gpus_of_two_kinds(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.has_gpus({"name": "NVIDIA H100", "major": 9, "minor": 0}, L4)
    with pytest.raises(ForgeError, match="not of one kind: NVIDIA H100, NVIDIA L4") as caught:
        build(tmp_path, workers=2)
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    assert build(tmp_path, workers=1).manifest.identity.versions["gpu"] == "NVIDIA H100"


def test_another_gpu_than_the_target(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    config = engine(backend="tensorrt_llm", target={"gpu": "l4"})
    with pytest.raises(ForgeError, match=r"for l4 \(SM 89\), and the GPU here is NVIDIA H100 80GB HBM3 \(SM 90\)"):
        build(tmp_path, config=config)


@pytest.mark.parametrize(
    ("asked", "found", "said"),
    [
        ("l4", L4, None),
        ("h100-80gb", H100, None),
        ("l40s", L4, "the engine is for l40s, and the GPU here is NVIDIA L4 with 23.6 GB (both SM 89)"),
        ("h200", H100, "the engine is for h200, and the GPU here is NVIDIA H100 80GB HBM3 with 84.9 GB (both SM 90)"),
    ],
)
def test_another_gpu_of_the_same_sm_is_a_warning(
    tmp_path: Path,
    trtllm: Trtllm,
    caplog: pytest.LogCaptureFixture,
    asked: str,
    found: Mapping[str, Any],
    said: str | None,
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.has_gpus(found)
    made = build(tmp_path, config=engine(backend="tensorrt_llm", target={"gpu": asked}))
    assert made.manifest.identity.versions["gpu"] == found["name"]
    why = f": it will run on {asked}, with kernels that were the fastest on the GPU here"
    assert caplog.messages == ([] if said is None else [said + why])


def test_formats_that_the_gpu_does_not_have(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", "FP8")
    trtllm.has_gpus({"name": "NVIDIA A100-SXM4-80GB", "major": 8, "minor": 0})
    with pytest.raises(
        ForgeError, match=r"NVIDIA A100-SXM4-80GB has compute capability 8\.0: fp8 needs 8\.9"
    ) as caught:
        build(tmp_path)
    assert "int4_awq" in caught.value.hint
    assert trtllm.calls() == []


def test_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ForgeError, match="CUDA_VISIBLE_DEVICES is empty"):
        build(tmp_path)


def test_a_driver_without_gpus(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.has_gpus()
    with pytest.raises(ForgeError, match="this machine has no GPU") as caught:
        build(tmp_path)
    assert "nvidia-smi" in caught.value.hint


def test_a_tensorrt_llm_that_does_not_load(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (trtllm.site / "tensorrt.py").write_text('raise ImportError("libnvinfer.so.10: cannot open shared object file")\n')
    with pytest.raises(LoggedError, match="asking for versions and GPUs ended with status 1") as caught:
        build(tmp_path)
    assert "libnvinfer.so.10" in caught.value.log.read_text()
    assert names(tmp_path) == ["checkpoint", "engine.logs", "site"]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"changes": {"0": {"max_batch_size": 4}}}, r"with build_config\.max_batch_size 4, 8 was decided"),
        (
            {"changes": {"0": {"plugin_config.use_paged_context_fmha": False}}},
            r"with plugin_config\.use_paged_context_fmha false, true was decided",
        ),
        ({"changes": {"0": {"plugin_config.gemm_plugin": None}}}, r"with plugin_config\.gemm_plugin none, auto was"),
        ({"changes": {"0": {"kv_cache_type": "CONTINUOUS"}}}, r"with build_config\.kv_cache_type CONTINUOUS, PAGED"),
        ({"version": {"0": "1.2.0"}}, r"with version 1\.2\.0, 1\.2\.1 was decided"),
        ({"empty": {"1": True}}, r"ended rank 1 without an error and without rank1\.engine"),
        ({"writes_too": {"1": {"rank7.engine": "?"}}}, r"wrote rank7\.engine for rank 1, which no engine has"),
        ({"writes_too": {"0": {"config.json": ""}}}, r"ended rank 0 without an error and without config\.json"),
    ],
)
def test_an_engine_that_is_not_as_planned_is_not_published(
    tmp_path: Path, trtllm: Trtllm, behaviour: Mapping[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(**behaviour)
    with pytest.raises(ForgeError, match=message) as caught:
        build(tmp_path)
    assert "Nothing was published" in caught.value.hint
    assert names(tmp_path) in (
        ["cache", "checkpoint", "engine.logs", "site"],
        ["checkpoint", "engine.logs", "site"],
    )


def test_what_a_release_makes_of_auto_and_of_draft_tokens_agrees(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    changes = {
        "plugin_config.gemm_plugin": "bfloat16",
        "speculative_decoding_mode": 2,
        "max_seq_len": 4101,
        "max_num_tokens": 9000,
    }
    trtllm.behaves(changes={"0": changes})
    assert not build(tmp_path).cached
    trtllm.behaves(changes={"0": {**changes, "max_seq_len": 4000}})
    with pytest.raises(ForgeError, match=r"max_seq_len 4000, 4096 was decided"):
        build(tmp_path, force=True)


def test_managed_weights_and_adapters_belong_to_the_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    adapter = {"lora/0/adapter_config.json": "{}"}
    trtllm.behaves(
        writes_too={"0": {**adapter, "rank0_managed_weights.safetensors": "w"}, "1": adapter}, fails={"1": "no"}
    )
    with pytest.raises(LoggedError):
        build(tmp_path)
    trtllm.behaves(writes_too={"1": adapter})
    made = build(tmp_path)
    assert sorted(made.manifest.files) == [
        "config.json",
        "lora/0/adapter_config.json",
        "rank0.engine",
        "rank0_managed_weights.safetensors",
        "rank1.engine",
        "tokenizer/tokenizer.json",
    ]


def test_the_torch_backend_has_no_container(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ForgeError, match="the torch backend builds in no container") as caught:
        compile_engine(
            engine(),
            tmp_path / "checkpoint",
            tmp_path / "engine",
            CompileOptions(container="image"),
            machine=Machine(docker=True, gpu=True),
        )
    assert "--backend tensorrt_llm" in caught.value.hint


def test_auto_is_tensorrt_llm_where_it_is_installed_beside_a_gpu(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    made = build(tmp_path, config=engine())
    assert (made.path / "rank0.engine").is_file()


def test_each_rank_shows_its_steps(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    seen = Watched()
    build(tmp_path, progress=seen)
    assert seen.titles == ["Rank 0", "Rank 1"]
    assert [bar.done for bar in seen.made] == [4, 4]
    assert seen.made[1].texts[-1] == "done"


class Watched:
    """Progress that counts."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.made: list[CountingBar] = []

    def bar(self, title: str, total: float, unit: str) -> Any:
        raise AssertionError("ranks have a bar each")

    def bars(self, titles: list[str], total: float, unit: str) -> "Watched":
        self.titles = titles
        self.made = [CountingBar() for _ in titles]
        return self

    def __enter__(self) -> "list[CountingBar]":
        return self.made

    def __exit__(self, *error: object) -> None:
        pass


class CountingBar:
    """How far it came, and what it said."""

    def __init__(self) -> None:
        self.done = 0.0
        self.texts: list[str] = []

    def advance(self, amount: float) -> None:
        self.done += amount

    def describe(self, text: str) -> None:
        self.texts.append(text)


def test_planning_starts_nothing(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    plan = plan_engine(
        engine(backend="tensorrt_llm"),
        tmp_path / "checkpoint",
        tmp_path / "engine",
        CompileOptions(workers=2),
        machine=MACHINE,
    )
    runs = plan.as_json()["runs"]
    assert [run["rank"] for run in runs] == [0, 1]
    assert [run["environment"] for run in runs] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert runs[1]["directory"] == str(tmp_path / ".engine.partial/.rank1")
    assert runs[1]["command"][2:] == ["build", str(tmp_path / "checkpoint"), "build_config.json", "1", "engine"]
    assert json.loads(json.dumps(plan.as_json()))["place"] == "this machine"
    assert trtllm.calls() == []
    assert names(tmp_path) == ["checkpoint", "site"]
