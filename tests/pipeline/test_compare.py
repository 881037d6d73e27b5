"""Builds side by side, from their reports."""

import json
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from tests.pipeline.records import full, least, quality, written
from trtforge.cli.compare import show_comparison
from trtforge.core.errors import ForgeError, UsageError
from trtforge.pipeline.compare import compared, notes
from trtforge.pipeline.differences import differences
from trtforge.verify.result import Blocks, Divergence, Perplexity, Verification


def test_figures_of_two_builds(tmp_path: Path) -> None:
    one = written(tmp_path / "fp8", full())
    other = written(tmp_path / "none", full(engine_bytes=16_100_000_000, verification=quality(passed=False)))
    fp8, none = compared([one, other])
    assert (fp8.name, none.name) == ("fp8", "none")
    assert (fp8.engine_bytes, none.engine_bytes) == (9_120_000_000, 16_100_000_000)
    assert fp8.smaller == pytest.approx(16_060_556_376 / 9_120_000_000)
    assert (fp8.gate, none.gate) == ("passed", "failed")
    assert (fp8.perplexity, fp8.perplexity_increase, fp8.kl_mean) == (6.0339, 0.0036, 0.00521)
    assert fp8.seconds == pytest.approx(212.4 + 14.2 + 388.0 + 745.9 + 3.1)
    assert fp8.tokens_per_second == pytest.approx(1000 * 128 / (5.1 + 0.2 * 128))
    assert (fp8.formats, fp8.layout) == ("weights fp8, KV cache fp8, bfloat16", "tp 2, pp 2")


def test_a_report_may_be_named_itself_and_know_little(tmp_path: Path) -> None:
    one = written(tmp_path / "a", least())
    found = compared([one / "report.json", one])
    assert [build.name for build in found] == ["a", "a (2)"]
    assert found[0].figures["engine"] == "-"
    assert (found[0].gate, found[0].model, found[0].tokens_per_second) == ("not verified", None, None)


def test_times_with_the_cache_are_marked(tmp_path: Path) -> None:
    ran = [stage.model_dump(mode="json") | {"cached": False, "origin": "written"} for stage in full().stages]
    taken = [stage | {"cached": True, "origin": "from the cache", "seconds": 0.1} for stage in ran[1:4]]
    builds = [written(tmp_path / "a", full(stages=ran)), written(tmp_path / "b", full(stages=[ran[0], *taken]))]
    whole, part = compared(builds)
    assert (whole.figures["build time"], part.figures["build time"]) == ("22 min 44 s", "3 min 33 s (cached)")
    assert (whole.cached, part.cached) == ((), ("convert", "verify", "compile"))
    assert notes([whole]) == ()
    assert notes([whole, part]) == ("cached: stages taken from the cache did not run; these times do not compare",)


def test_weights_that_the_engine_build_quantises_are_explained(tmp_path: Path) -> None:
    found = full().model_dump(mode="json")
    quants = ("int8_wo", "fp8", "int4_wo")
    builds = [
        written(tmp_path / quant, full(deployment=found["deployment"] | {"quant": quant}, stages=found["stages"][1:2]))
        for quant in quants
    ]
    assert notes(compared(builds)) == (
        "int4_wo and int8_wo: the engine build quantises the layers, so the checkpoint holds them unquantised",
    )
    assert notes(compared([builds[1], builds[1]])) == ()


def test_names_that_are_alike_get_their_parents(tmp_path: Path) -> None:
    builds = [written(tmp_path / parent / "fp8", full()) for parent in ("one", "two")]
    assert [build.name for build in compared(builds)] == ["one/fp8", "two/fp8"]
    deep = [written(tmp_path / parent / "build" / "fp8", full()) for parent in ("one", "two")]
    assert [build.name for build in compared(deep)] == ["one/build/fp8", "two/build/fp8"]
    assert [build.name for build in compared([*builds, deep[0]])] == ["one/fp8", "two/fp8", "build/fp8"]


def test_builds_of_one_name_have_their_own_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    worse = {"one": 0.01, "two": 0.03, "three": 0.05}
    builds = [verified(tmp_path / place / "build" / "a", added) for place, added in worse.items()]
    show_comparison(compared([*builds, builds[0]]))
    shown = " ".join(capsys.readouterr().out.split())
    assert "KL mean, against the first - +0.02 to +0.02 +0.04 to +0.04 +0 to +0" in shown


def test_what_is_no_build_is_refused(tmp_path: Path) -> None:
    build = written(tmp_path / "a", full())
    with pytest.raises(UsageError, match="compare needs two builds"):
        compared([build])
    with pytest.raises(ForgeError, match=r"has no report\.json: not a build directory"):
        compared([build, DEMO_MODEL])
    with pytest.raises(ForgeError, match=r"it holds the build a$"):
        compared([build, tmp_path])
    other = written(tmp_path / "b", full())
    with pytest.raises(ForgeError, match="it holds the builds a, b") as caught:
        compared([tmp_path])
    assert caught.value.hint == f"Give the builds themselves. Run `trtforge compare {build} {other}`."
    (build / "report.json").write_text('{"recipe": "x"}')
    with pytest.raises(ForgeError, match=r"report\.json: 4 mistakes\n  stages is missing"):
        compared([build, build])


def verified(directory: Path, added: float, *, text: float = 3.0, blocks: int = 64) -> Path:
    """A build whose candidate is worse by `added` nats a token than the reference, a little more in even blocks."""
    hardness = [text + 0.1 * (n % 7) for n in range(blocks)]
    worse = [added + 0.01 * (n % 2) for n in range(blocks)]
    nll = [100 * each for each in hardness]
    kept = Blocks(
        tokens=(100,) * blocks,
        reference=tuple(nll),
        candidate=tuple(one + 100 * two for one, two in zip(nll, worse, strict=True)),
        divergence=tuple(100 * each for each in worse),
    )
    mean = sum(worse) / blocks
    found = Verification(
        perplexity=Perplexity(reference=20.0, candidate=21.0),
        kl=Divergence(mean=mean, p99=3 * mean),
        top1_agreement=0.9,
        max_abs_logit_error=0.5,
        tokens=100 * blocks,
        tensors_checked=3,
        blocks=kept,
    )
    build = written(directory, full(verification=found.as_json()))
    metrics = {"verification": found.model_dump(mode="json"), "compression": 2.0}
    (build / "verification").mkdir()
    (build / "verification" / "verification.json").write_text(json.dumps(metrics))
    return build


def test_a_difference_beyond_the_interval_is_real(tmp_path: Path) -> None:
    builds = [verified(tmp_path / "a", 0.01), verified(tmp_path / "b", 0.03), verified(tmp_path / "c", 0.01)]
    worse, same = differences(compared(builds))
    assert (worse.name, worse.baseline, same.name) == ("b", "a", "c")
    assert worse.as_json()["kl_mean"] == {"interval": pytest.approx([0.02, 0.02]), "real": True}
    assert same.as_json()["kl_mean"] == {"interval": [0.0, 0.0], "real": False}
    assert worse.line == (
        "b against a: perplexity +2.02% to +2.02%, mean KL +0.02 to +0.02 nats; "
        "perplexity and KL differ by more than chance"
    )
    assert same.line == "c against a: perplexity +0.00% to +0.00%, mean KL +0 to +0 nats; no difference is shown"
    assert list(same.figures.values()) == ["+0.00% to +0.00%", "+0 to +0", "none shown"]


def test_what_does_not_compare_says_why(tmp_path: Path) -> None:
    first, other = verified(tmp_path / "a", 0.01), verified(tmp_path / "b", 0.03, text=4.0)
    (found,) = differences(compared([first, other]))
    assert found.line == "b against a: verified on other text, so they do not compare"
    few = [verified(tmp_path / name, 0.01, blocks=4) for name in ("c", "d")]
    (found,) = differences(compared(few))
    assert found.line == "d against c: too few tokens for an interval: give the gate more samples"
    path = few[0] / "verification" / "verification.json"
    cut = json.loads(path.read_text())
    cut["verification"]["blocks"]["candidate"].pop()
    path.write_text(json.dumps(cut))
    (found,) = differences(compared(few))
    assert found.line == "d against c: the verification is of an older version: build again"
    old = [first, written(tmp_path / "old", full())]
    (found,) = differences(compared(old))
    assert found.line == "old against a: the verification is of an older version: build again"
    assert differences(compared([first, written(tmp_path / "least", least())])) == ()
