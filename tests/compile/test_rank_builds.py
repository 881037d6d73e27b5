"""Ranks of an engine: side by side, once for all who want them, kept when others fail."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine
from tests.compile.engines import build, files, names
from tests.compile.trtllm import L4, MACHINE, Trtllm, write_checkpoint
from trtforge.compile.stage import compile_engine
from trtforge.core.artifact import Produced
from trtforge.core.cache_prune import list_entries
from trtforge.core.errors import LoggedError


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
            os.kill(os.getpid(), signal.SIGINT)
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
