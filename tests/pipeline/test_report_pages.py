"""The report's pages as text: what they say, that nothing in them is markup of others, and their size."""

import re

import pytest

from tests.pipeline.records import full, least, quality
from trtforge.pipeline.record import Record
from trtforge.pipeline.report_pages import build_markdown, build_page
from trtforge.pipeline.report_words import metrics

HOSTILE = "<script>alert('x')</script>|`[a](b)`\n# *_"


def test_the_page_needs_nothing_else() -> None:
    page = build_page(full())
    assert len(page.encode()) < 1_000_000
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=\"(?!data:)[^\"]*", page) == []
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert "url(" not in page


@pytest.mark.parametrize("key", ["recipe", "next", "out", "warnings", "settings", "versions"])
def test_foreign_text_is_escaped(key: str) -> None:
    value = {"warnings": [HOSTILE], "settings": {"name": HOSTILE}, "versions": {"torch": HOSTILE}}.get(key, HOSTILE)
    page = build_page(full(**{key: value}))
    assert "<script" not in page
    assert "&lt;script&gt;alert(" in page


def test_a_thousand_layers_stay_below_a_megabyte() -> None:
    layers = [{"layer": n, "error": 0.1, "added": 0.0} for n in range(1000)]
    calibration = [{"layer": n, "input_amax": 1.0, "input_amax_of": "mlp"} for n in range(1000)]
    record = full(verification=quality(layers=layers), calibration=calibration)
    assert len(build_page(record).encode()) < 1_000_000


def test_markdown_has_the_figures_beside_their_limits() -> None:
    text = build_markdown(full())
    assert text.startswith("## llama-3.1-8b-fp8: passed\n")
    assert "| perplexity | 6.034 against 6.012 (+0.36%) | - | at most +2.00% | passed |" in text
    assert "| calibrate | from the cache | - | - | 1.24 MB |" in text
    assert "| verify | passed | 6 min 28 s | 5.31 GB | - |" in text
    assert "| ranks 0 to 1 | 74.4 GB | 85 GB | 4.6 GB | 66 GB |" in text
    assert "TTFT (estimate)" in text
    assert "16.1 GB → 9.12 GB, 1.76 times smaller; quantised layers 1.99 times" in text
    assert text.endswith("Next: `trtforge serve build/llama-3.1-8b-fp8/repository`\n")


def test_intervals_and_the_99th_percentile_stand_beside_the_figures() -> None:
    perplexity = {"reference": 6.0, "candidate": 6.03, "increase": 0.005, "increase_interval": [0.0031, 0.0072]}
    measured = quality(
        perplexity=perplexity, kl_p99=0.0812, kl_p99_interval=[0.07, 0.1], kl_mean_interval=[0.005, 0.006]
    )
    record = full(verification=measured)
    text = build_markdown(record)
    assert "| perplexity | 6.030 against 6.000 (+0.50%) | +0.31% to +0.72% | at most +2.00% | passed |" in text
    assert "| mean KL divergence | 0.00521 nats | 0.005 to 0.006 | no limit | no limit |" in text
    assert "| 99th percentile of KL | 0.0812 nats | 0.07 to 0.1 | no limit | no limit |" in text
    for said in ("+0.31% to +0.72%", "0.0812 nats", "0.07 to 0.1"):
        assert said in build_page(record)
    gate = full().gate
    assert gate is not None
    judged = metrics(record.verification, gate.model_copy(update={"kl_p99": 0.08}))  # type: ignore[arg-type]
    assert [metric.passed for metric in judged] == [True, True, None, False]


def test_tables_of_markdown_stand_alone() -> None:
    """A table that follows text without an empty line is text on GitHub."""
    for record in (full(), least(), full(verification=None), full(deployment=None)):
        lines = build_markdown(record).splitlines()
        heads = [number for number, line in enumerate(lines) if re.fullmatch(r"\|[-:|]+\|", line)]
        assert heads
        for head in heads:
            assert lines[head - 2] == "", lines[head - 1]
            assert lines[head].count("|") == lines[head - 1].count("|") == lines[head + 1].count("|")


def test_foreign_text_breaks_no_table_of_markdown() -> None:
    text = build_markdown(full(warnings=[HOSTILE], recipe="a|b"))
    (line,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert line == "- \\<script\\>alert('x')\\</script\\>\\|\\`\\[a\\](b)\\` # \\*\\_"
    assert text.startswith("## a\\|b: ")


def test_the_least_report_is_shown_without_what_is_not_known() -> None:
    page, text = build_page(least()), build_markdown(least())
    for word in ("Quality gate", "Planned memory", "Estimated speed", "Versions"):
        assert word not in page
    assert "not verified" in page
    assert "| metric |" not in text
    assert "None" not in page + text


def test_values_that_are_not_numbers_fail() -> None:
    unknown = {"reference": 6.0, "candidate": None, "increase": None}
    record = full(verification=quality(perplexity=unknown, kl_mean=None, passed=False))
    assert record.verification is not None
    found = metrics(record.verification, record.gate)
    assert [metric.verdict for metric in found] == ["failed", "passed", "failed"]
    assert "- against 6.000 (-)" in build_page(record)


def test_metrics_of_an_earlier_run_are_said_to_be() -> None:
    stages = [stage.model_dump(mode="json") for stage in full().stages if stage.stage != "verify"]
    assert "Measured by an earlier run." in build_page(full(stages=stages))
    assert "; measured by an earlier run" in build_markdown(full(stages=stages))
    assert "earlier run" not in build_page(full()) + build_markdown(full()) + build_page(least())


def test_limits_are_inclusive_as_the_gate_is() -> None:
    record = full(verification=quality(perplexity={"reference": 1.0, "candidate": 1.02, "increase": 0.02}))
    assert record.verification is not None
    assert metrics(record.verification, record.gate)[0].passed is True


def test_a_record_ignores_keys_of_newer_versions() -> None:
    values = least().model_dump(mode="json") | {"newer": 1}
    assert Record.parse(values, "test") == least()
