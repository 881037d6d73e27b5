"""`trtforge tune` as a user types it; the measurement itself is that of other tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import torch_engine
from tests.pipeline.records import full, written
from tests.tune.points import point
from trtforge.cli.features import parse_features
from trtforge.core.features import FeaturesConfig
from trtforge.core.serving import ServingConfig
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.tune.choice import compare
from trtforge.tune.result import Trial, Tuning, package_options
from trtforge.tune.tuner import Found, Tuner
from trtforge.tune.variants import Variant

SMALLER = Variant(changes={"max_batch_size": 4})
PRESENT = Trial(variant=Variant(), points=(point(1, 50), point(8, 100), point(16, 90, first=300)))
TRIALS = (
    PRESENT,
    Trial(variant=SMALLER, points=(point(8, 120),), comparison=compare((100, 101, 99), (120, 118, 121))),
    Trial(variant=Variant(changes={"scheduler": "max_utilization"}), untried="not enough time was left"),
)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build whose engine is not run."""
    build = written(tmp_path / "build", full())
    engine = torch_engine(build / "engine")
    config = PackageConfig(serving=ServingConfig(max_queue_size=64), name_prefix="my-")
    package(config, engine, DEMO_MODEL, build / "repository")
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    monkeypatch.chdir(tmp_path)
    return build


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the measurement find this at once."""

    def find(recommended: Variant, load: Any = None, trials: tuple[Trial, ...] = TRIALS) -> None:
        def run(tuner: Tuner) -> Found:
            tuner.say("something")
            return Found(trials, recommended, load)

        monkeypatch.setattr(Tuner, "run", run)

    return find


def test_settings_that_are_better_are_printed_and_kept(run: Any, build: Path, finding: Any) -> None:
    finding(SMALLER, point(8, 120))
    before = sorted(path for path in build.rglob("*"))
    status, out, err = run("tune", "build", "--ttft", "200", "--concurrency", "16,8,1", "--percentile", "90")
    assert (status, err) == (0, "measured something\n")
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "settings"
    assert lines[1].split() == ["present", "settings", "1", "50", "10", "1.0"]
    assert lines[3].split() == ["16", "90", "300", "1.0", "over", "a", "limit"]
    assert lines[4].split()[:3] == ["max_batch_size", "4", "8"]
    assert lines[4].endswith("  better, +20%")
    legend = "first ms, each ms: to the first text, for each further token, at p90; gains in 3 repetitions"
    assert lines.pop(5) == legend
    assert max(map(len, lines[:5])) <= 80
    assert lines[5] == "not measured: scheduler max_utilization: not enough time was left"
    assert lines[6:9] == ["recommended: max_batch_size 4; in a recipe:", "  serving:", "    max_batch_size: 4"]
    assert lines[9].startswith("the time ended before all was measured: give more --time")
    assert lines[10].startswith("highest load within the limits: 8 at once: 120 tokens/s, first text 10 ms")
    assert "; other work used 0.5 processors before" in lines[11]
    assert lines[12] == "kept in build/tune.json"
    options = "--name my- --set serving.max_batch_size=4 --set serving.max_queue_size=64"
    assert lines[13] == f"next: trtforge package build/engine build/repository {options}"
    kept = Tuning.model_validate_json((build / "tune.json").read_text())
    assert kept.recommended == SMALLER
    assert kept.load.concurrency == (1, 8, 16)
    assert kept.goal.percentile == 90
    assert sorted(path for path in build.rglob("*") if path.name != "tune.json") == before


def test_the_median_repetition_is_shown(run: Any, build: Path, finding: Any) -> None:
    """As gains are of medians."""
    present = Trial(variant=Variant(), points=tuple(point(8, speed) for speed in (130, 70, 100, 110)))
    cut = Variant(changes={"max_num_tokens": 256})
    trials = (
        present,
        Trial(
            variant=SMALLER,
            points=tuple(point(8, speed) for speed in (90, 120, 130, 80)),
            comparison=compare((70, 100, 110), (120, 130, 80)),
        ),
        Trial(variant=cut, points=(point(8, 60),), untried="clearly worse"),
    )
    finding(Variant(), trials=trials)
    _, out, _ = run("tune", "build")
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[2] for row in rows] == ["8", "8", "8"]
    assert [row[3] for row in rows] == ["100", "120", "60"]
    assert rows[1][-2:] == ["noise,", "+20%"]
    answers = ((100, 40), (70, 45), (110, 50))  # tokens per second, and the times that --goal latency judges
    measured = tuple(point(8, speed, answer=ms) for speed, ms in answers)
    finding(Variant(), trials=(Trial(variant=Variant(), points=measured), *trials[1:]))
    _, out, _ = run("tune", "build", "--goal", "latency")
    assert out.splitlines()[1].split()[3] == "70"


def test_present_settings_that_stay_are_served(run: Any, build: Path, finding: Any) -> None:
    finding(Variant())
    status, out, err = run("tune", "build", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["next"] == "trtforge serve build/repository"
    assert found["recommended"] == {"changes": {}}
    assert found["settings"] == {"max_queue_size": 64}
    assert found["trials"][1]["comparison"]["verdict"] == "better"
    assert found["file"] == "build/tune.json"
    _, out, _ = run("tune", "build", "--quiet", "--token-latency", "0.5")
    assert "recommended: the present settings; no variant was better beyond the noise" in out
    assert "no measured load keeps the limits (most tokens per second, each further token within 0.5 ms" in out


def test_a_repository_alone_is_packaged_beside_itself(run: Any, build: Path, finding: Any, tmp_path: Path) -> None:
    finding(SMALLER)
    alone = tmp_path / "elsewhere" / "repo"
    alone.parent.mkdir()
    (build / "repository").rename(alone)
    status, out, _ = run("tune", alone)
    assert status == 0
    assert "kept in" not in out
    words = out.splitlines()[-1].split()
    engine, tokenizer = "elsewhere/repo/my-tensorrt_llm/1/engine", "elsewhere/repo/my-preprocessing/1/tokenizer"
    assert words[1:7] == ["trtforge", "package", engine, "elsewhere/repo-tuned", "--tokenizer", tokenizer]
    status, _, err = run(*words[2:])
    assert (status, err) == (0, "")
    assert list(alone.parent.iterdir()) != [alone]


def test_a_server_that_failed_is_no_lack_of_time(run: Any, build: Path, finding: Any) -> None:
    cut = Trial(variant=SMALLER, points=(point(8, 120),), comparison=compare((100,), (120,)), failed="it ended")
    finding(Variant(), trials=(PRESENT, cut))
    _, out, _ = run("tune", "build")
    assert "the repetitions ended early, since a server failed: max_batch_size 4: it ended\n" in out
    assert "  server failed\n" in out
    assert "the time ended" not in out


@pytest.mark.parametrize("features", [None, {}, {"kv_reuse": False, "lookahead": {"window": 7}, "lora": {}}])
def test_the_next_command_keeps_the_options_of_package(features: Any) -> None:
    target = {"tensorrt_llm": "1.2.1", "gpu": "h100-80gb"}
    config = PackageConfig.parse({"name_prefix": "my-", "features": features, "target": target}, "test")
    name, prefix, version, release, gpu, product, *others = package_options(config)
    assert [name, prefix] == ["--name", "my-"]
    assert [version, release, gpu, product] == ["--target-version", "1.2.1", "--gpu", "h100-80gb"]
    assert set(others[::2]) == ({"--feature"} if features is not None else set())
    read = FeaturesConfig.parse(parse_features(others[1::2]), "test")
    assert read == (config.features or FeaturesConfig())


def test_a_dry_run_measures_nothing(run: Any, build: Path) -> None:
    status, out, err = run("tune", "build", "--dry-run", "--concurrency", "4,8", "--requests", "20", "--time", "90")
    assert (status, err) == (0, "")
    assert "loads: 4, 8 requests at once, 20 requests each\n" in out
    assert "settings: present settings; scheduler max_utilization; kv_cache_fraction 0.95\n" in out
    assert "time: at most 90.0 s, for up to 15 starts of a server\n" in out
    status, out, _ = run("tune", "build", "--dry-run", "--json")
    planned = json.loads(out)
    assert planned["servers"] == 1 + len(planned["variants"]) + 4 * 3
    assert not (build / "tune.json").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["build", "--goal", "fast"], 2, "--goal"),
        (["build", "--ttft", "0"], 2, "--ttft"),
        (["build", "--percentile", "101"], 2, "--percentile"),
        (["build", "--concurrency", "x"], 2, "not numbers from 1"),
        (["build", "--repeats", "2"], 2, "--repeats"),
        (["build", "--prompt-tokens", "9000"], 1, "the engine takes prompts of up to"),
        (["build", "--concurrency", "1,4000"], 1, "--concurrency 4000: the repository refuses more than"),
        (["build/engine"], 1, "is the result of stage engine, repository is required"),
        (["bild"], 1, "Did you mean"),
    ],
)
def test_what_is_wrong_is_said(run: Any, build: Path, words: list[str], status: int, said: str) -> None:
    found, out, err = run("tune", *words)
    assert (found, out) == (status, "")
    assert said in err
    assert "Traceback" not in err
