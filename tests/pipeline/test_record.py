"""A report.json of others is refused or shown, whatever its values are."""

import copy
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.records import full, least, written
from trtforge.cli.build_view import show_report
from trtforge.core.errors import ForgeError
from trtforge.pipeline.compare import Compared
from trtforge.pipeline.record import Record, read_record
from trtforge.pipeline.report_pages import build_markdown, build_page, compare_page

VALUES: dict[str, Any] = full().model_dump(mode="json")
NASTY = (None, 0, -1, 10**39, 1e308, -1e308, "", "x" * 1000, [], {}, True, [None], {"a": 1}, float("inf"))


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, of lists those of the first item."""
    keys = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


PLACES = list(places(VALUES))


@given(st.sampled_from(PLACES), st.sampled_from(NASTY))
def test_any_value_is_refused_or_shown(place: tuple[Any, ...], value: Any) -> None:
    values = copy.deepcopy(VALUES)
    inner = values
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        record = Record.parse(values, "report.json")
    except ForgeError:
        return
    build_page(record)
    build_markdown(record)
    compare_page([Compared.of("a", Path("a"), record)] * 2)
    with redirect_stdout(StringIO()):
        show_report(record)


def test_a_report_is_read_back(tmp_path: Path) -> None:
    assert read_record(written(tmp_path / "build", full())) == full()
    assert read_record(written(tmp_path / "old", least())).model is None


def test_a_damaged_report_is_refused_by_name(tmp_path: Path) -> None:
    build = written(tmp_path / "build", full())
    (build / "report.json").write_text("{")
    with pytest.raises(ForgeError, match=r"build/report\.json"):
        read_record(build)
    (build / "report.json").write_text(json.dumps([1]))
    with pytest.raises(ForgeError, match=r"report\.json: not a JSON object"):
        read_record(build)


def test_ratios_and_times() -> None:
    assert full().seconds == pytest.approx(1363.6)
    assert least().smaller is None
    assert full(engine_bytes=0).smaller is None
