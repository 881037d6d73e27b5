"""The trace of an engine's iterations: it can be read, and its sums are those of the answers."""

import json
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.runtime.checkpoints import write_engine
from tests.runtime.test_engine import requests_for
from trtforge.core.errors import ForgeError
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.formats.triton import RepositoryFacts
from trtforge.launch.server_arguments import model_environment
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
from trtforge.runtime.hosted import HostJob
from trtforge.runtime.trace import PHASES
from trtforge.serve.config import ServeConfig
from trtforge.serve.embedded import check_trace, remove_trace


def events_of(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        (EngineOptions(), {}),
        (EngineOptions(scheduler="max_utilization", kv_cache_tokens=128, kv_reuse=False), {"tokens_per_block": 4}),
        (EngineOptions(chunked_context=True, kv_reuse=False), {"max_num_tokens": 16}),
    ],
    ids=["plain", "paused", "chunked"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_the_sums_of_a_trace_are_those_of_the_answers(
    checkpoint: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    options: EngineOptions,
    limits: dict[str, int],
    ahead: bool,
) -> None:
    path = tmp_path / "trace.json"
    directory = write_engine(checkpoint, tmp_path / "engine", **limits)
    traced = EngineOptions(**{**vars(options), "trace": path})
    with Engine.load(directory, traced) as engine:
        engine._computes_ahead = ahead
        answers = generate_with(engine, requests_for(prompts, 12))
        said = engine.statistics()
    slices = events_of(path, "X")
    last = [event for event in slices if event["name"].startswith("tokens of iteration ")]
    assert [event["name"] for event in last[-1:]] == ([f"tokens of iteration {said.iterations}"] if ahead else [])
    iterations = [event for event in slices if event["name"].startswith("iteration ")]
    wholes = sorted(iterations + last, key=lambda event: float(event["ts"]))
    assert [event["name"] for event in iterations] == [f"iteration {n + 1}" for n in range(said.iterations)]
    assert sum(event["args"]["sampled"] for event in (*iterations, *last)) == sum(
        len(answer.tokens) for answer in answers
    )
    assert sum(event["args"]["tokens"]["context"] for event in iterations) == said.context_tokens
    if options.scheduler == "guaranteed_no_evict":
        assert said.context_tokens == sum(map(len, prompts))
        generated = sum(event["args"]["tokens"]["generation"] for event in iterations)
        assert generated == sum(len(answer.tokens) - 1 for answer in answers)
    assert iterations[-1]["args"]["pauses"] == said.paused_requests
    for event in iterations:
        blocks = event["args"]["blocks"]
        assert blocks["used"] + blocks["free"] == said.kv_blocks_max
    assert wholes[-1]["args"]["blocks"]["used"] == 0
    assert wholes[-1]["args"]["sequences"] == {"running": 0, "waiting": 0}
    for name in PHASES:
        phases = [event for event in slices if event["name"] == name]
        for phase, whole in zip(phases, wholes, strict=True):
            assert whole["ts"] <= phase["ts"]
            assert phase["ts"] + phase["dur"] <= whole["ts"] + whole["dur"] + 0.5  # rounded to 0.1 us


def test_the_counters_of_a_trace_end_at_zero(engine_directory: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Also if nothing runs any more because the only request was cancelled."""
    path, outputs = tmp_path / "trace.json", queue.Queue[Output]()
    with Engine.load(engine_directory, EngineOptions(trace=path, name="engine tensorrt_llm")) as engine:
        engine.submit((GenerationRequest("0", tuple(prompts[0]), 400), outputs.put))
        outputs.get(timeout=PATIENCE)
        engine.cancel("0")
        while outputs.get(timeout=PATIENCE).finish_reason is None:
            pass
        blocks = engine.statistics().kv_blocks_max
    counters = events_of(path, "C")
    last = {event["name"]: event["args"] for event in sorted(counters, key=lambda event: float(event["ts"]))}
    assert last == {
        "tokens": {"context": 0, "generation": 0},
        "KV blocks": {"used": 0, "free": blocks},
        "sequences": {"running": 0, "waiting": 0},
    }
    first = next(event for event in events_of(path, "X") if event["name"] == "iteration 1")
    held = next(event for event in counters if event["name"] == "KV blocks")
    assert held["args"] == first["args"]["blocks"]
    assert held["ts"] == pytest.approx(first["ts"] + first["dur"], abs=0.11)  # rounded to 0.1 us
    assert [event["args"]["name"] for event in events_of(path, "M")] == ["engine tensorrt_llm", "requests"]


def test_each_request_has_a_span_with_its_counts(
    engine_directory: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with Engine.load(engine_directory, EngineOptions(trace=path)) as engine:
        generate_with(engine, requests_for(prompts, 5))
    begun = {event["id"]: event for event in events_of(path, "b")}
    ended = {event["id"]: event for event in events_of(path, "e")}
    assert begun.keys() == ended.keys() == set(range(len(prompts)))
    for number, prompt in enumerate(prompts):
        assert begun[number]["name"] == ended[number]["name"] == f"request {number}"
        assert begun[number]["args"] == {"prompt_tokens": len(prompt), "max_tokens": 5}
        assert ended[number]["args"]["generated_tokens"] == 5
        assert ended[number]["args"]["finish_reason"] == "length"
        assert begun[number]["ts"] <= ended[number]["ts"]


def test_the_trace_of_a_killed_engine_can_be_read(engine_directory: Path, tmp_path: Path) -> None:
    """Viewers close the array themselves."""
    path = tmp_path / "trace.json"
    code = f"""
import os
from pathlib import Path
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with
engine = Engine.load(Path({str(engine_directory)!r}), EngineOptions(trace=Path({str(path)!r})))
generate_with(engine, [GenerationRequest("0", (1, 2, 3), 4)])
generate_with(engine, [GenerationRequest("0", (1, 2, 3), 4)])
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE).returncode == 9
    names = [event["name"] for event in json.loads(path.read_text() + "]")]
    assert "iteration 4" in names


def test_a_server_hands_the_file_to_its_engine_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.chdir(tmp_path)
    for name, value in model_environment(ServeConfig(trace=Path("trace.json"))).items():
        monkeypatch.setenv(name, value)
    job = HostJob(engine="e", socket="s")
    assert job.options().trace == path
    path.write_text("[\n")
    assert job.options().trace == tmp_path / "trace.2.json"  # after a restart
    (tmp_path / "trace.2.json").write_text("[\n")
    assert job.options().trace == tmp_path / "trace.3.json"
    draft = job.model_copy(update={"model": "tensorrt_llm_draft", "drafts": True}).options()
    assert (draft.trace, draft.name) == (tmp_path / "trace.tensorrt_llm_draft.json", "engine tensorrt_llm_draft")
    assert "TRTFORGE_TRACE" not in model_environment(ServeConfig())


def test_a_server_refuses_a_trace_that_nobody_writes(tmp_path: Path) -> None:
    facts = RepositoryFacts(backend="tensorrt_llm", device="cuda", tensorrt_llm="1.2.1", world_size=1, engine_path="e")
    check_trace(facts, None)
    with pytest.raises(ForgeError, match="--trace: an engine of backend tensorrt_llm writes no trace"):
        check_trace(facts, tmp_path / "trace.json")
    embedded = facts.model_copy(update={"backend": "torch"})
    for name in ("trace.json", "trace.tensorrt_llm_draft.json"):
        (tmp_path / name).write_text("[\n")
    check_trace(embedded, tmp_path / "trace.json")
    remove_trace(embedded, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.tensorrt_llm_draft.json"]
    remove_trace(embedded.model_copy(update={"draft_ranks": 1}), tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ForgeError, match=r"--trace .*trace\.json: its directory does not exist"):
        check_trace(embedded, tmp_path / "missing" / "trace.json")


def test_a_trace_that_cannot_be_written_is_refused(engine_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ForgeError, match=r"the trace .*missing/trace\.json cannot be written: No such file or directory"
    ):
        Engine.load(engine_directory, EngineOptions(trace=tmp_path / "missing" / "trace.json"))


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    engine_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/full takes nothing."""
    (tmp_path / "trace.json").symlink_to("/dev/full")
    with Engine.load(engine_directory, EngineOptions(trace=tmp_path / "trace.json")) as engine:
        (answer,) = generate_with(engine, requests_for([[1, 2, 3]], 4))
    assert len(answer.tokens) == 4
    assert "the trace" in caplog.text
    assert "No space left on device" in caplog.text
