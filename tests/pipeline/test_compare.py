"""Builds side by side, from their reports."""

from pathlib import Path

import pytest

from tests.pipeline.records import full, least, quality, written
from trtforge.core.errors import ForgeError, UsageError
from trtforge.pipeline.compare import compared


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
    assert [build.name for build in found] == [f"{tmp_path.name}/a"] * 2
    assert found[0].figures["engine"] == "-"
    assert (found[0].gate, found[0].model, found[0].tokens_per_second) == ("not verified", None, None)


def test_names_that_are_alike_get_their_parents(tmp_path: Path) -> None:
    builds = [written(tmp_path / parent / "fp8", full()) for parent in ("one", "two")]
    assert [build.name for build in compared(builds)] == ["one/fp8", "two/fp8"]


def test_what_is_no_build_is_refused(tmp_path: Path) -> None:
    build = written(tmp_path / "a", full())
    with pytest.raises(UsageError, match="compare needs two builds"):
        compared([build])
    with pytest.raises(ForgeError, match=r"has no report\.json: not a build directory"):
        compared([build, tmp_path])
    (build / "report.json").write_text('{"recipe": "x"}')
    with pytest.raises(ForgeError, match=r"report\.json: 4 mistakes\n  stages is missing"):
        compared([build, build])
