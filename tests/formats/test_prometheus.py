"""Prometheus' text format."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.core.errors import ForgeError
from trtforge.formats.prometheus import Sample, parse_metrics


def test_samples_with_and_without_labels() -> None:
    text = '# HELP a b\n\na 1\nb{x="1",y="q\\"\\\\\\n}"} 2.5 1700000000\n c:d{z="",} -3e2\n'
    assert parse_metrics(text, "test") == (
        Sample("a", {}, 1),
        Sample("b", {"x": "1", "y": 'q"\\\n}'}, 2.5),
        Sample("c:d", {"z": ""}, -300),
    )


def test_values_that_are_not_finite_and_a_cut_line_are_left_out() -> None:
    assert parse_metrics("a NaN\nb +Inf\nc 1\nd 12", "test") == (Sample("c", {}, 1),)


@pytest.mark.parametrize("line", ["<html>", "a", "a b", "a{ 1", "a{x=1} 1", 'a{x="1} 1', "1a 2", 'a{x="1" y="2"} 3'])
def test_other_lines_are_said(line: str) -> None:
    with pytest.raises(ForgeError, match="place: line 2 is not of Prometheus' text format"):
        parse_metrics(f"a 1\n{line}\n", "place")


def test_a_text_has_a_limit() -> None:
    with pytest.raises(ForgeError, match="more than 100,000 lines"):
        parse_metrics("a 1\n" * 100_001, "test")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    found: tuple[Sample, ...] = ()
    with suppress(ForgeError):
        found = parse_metrics(text, "test")
    assert all(sample.name in text for sample in found)


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


@given(st.dictionaries(names, st.text(st.characters(codec="ascii"))), st.floats(-1e9, 1e9))
def test_what_is_written_is_read(labels: dict[str, str], value: float) -> None:
    written = ",".join(
        '{}="{}"'.format(key, text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"'))
        for key, text in labels.items()
    )
    (found,) = parse_metrics(f"a{{{written}}} {value!r}\n", "test")
    assert (found.labels, found.value) == (labels, value)
