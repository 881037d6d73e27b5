import pytest

from trtforge.core import figures


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (54_400, "54.4 kB"),
        (999_400, "999 kB"),
        (999_500, "1 MB"),
        (999_999_999_999_999, "1000 TB"),
        (4_070_000, "4.07 MB"),
        (85_000_000_000, "85 GB"),
        (1 << 60, "1152922 TB"),
    ],
)
def test_sizes(count: int | None, text: str) -> None:
    assert figures.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (99.9, "99.9 s"),
        (99.96, "1 min 40 s"),
        (745.9, "12 min 26 s"),
        (3599.7, "1 h 00 min"),
        (7_500, "2 h 05 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert figures.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (97, "97"),
        (4_065_536, "4.07 M"),
        (8_030_261_248, "8.03 B"),
        (405_853_388_800, "406 B"),
        (999_600, "1 M"),
    ],
)
def test_parameters(count: int | None, text: str) -> None:
    assert figures.parameters(count) == text


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (None, "-"),
        (2.186, "2.19 times smaller"),
        (1.004, "the same size"),
        (0.998, "the same size"),
        (0.5, "2 times larger"),
    ],
)
def test_ratios(times: float | None, text: str) -> None:
    assert figures.ratio(times) == text


def test_what_is_not_known_is_a_dash() -> None:
    assert {figures.change(None), figures.share(None), figures.number(None)} == {"-"}
    assert (figures.change(0.004), figures.change(-0.1)) == ("+0.40%", "-10.00%")
    assert (figures.change(-0.00004), figures.change(-0.00006)) == ("+0.00%", "-0.01%")
    assert (figures.share(0.93281), figures.number(60.5634), figures.number(0.00521, 2)) == (
        "93.28%",
        "60.56",
        "0.0052",
    )


@pytest.mark.parametrize(("most", "text"), [(2, "a, b and 1 more"), (3, "a, b, c")])
def test_long_lists_are_cut(most: int, text: str) -> None:
    assert figures.listed(["a", "b", "c"], most) == text
