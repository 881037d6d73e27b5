"""Versions as packages and drivers write them, and the requirements that name them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.doctor.versions import Requirement, at_least, numbers, requirements

parts = st.lists(st.integers(0, 999), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.10.0a0+b4e4ee81d3.nv25.12", (2, 10, 0)), ("590.44.01", (590, 44, 1)), ("1.3.0rc20", (1, 3, 0)), ("dev", ())],
)
def test_numbers_of_a_version(version: str, expected: tuple[int, ...]) -> None:
    assert numbers(version) == expected


@given(parts, parts)
def test_order_is_that_of_the_numbers(first: list[int], second: list[int]) -> None:
    one, two = (".".join(map(str, numbers)) for numbers in (first, second))
    width = max(len(first), len(second))
    expected = first + [0] * (width - len(first)) >= second + [0] * (width - len(second))
    assert at_least(one, two) is expected
    assert Requirement("x", f">={two}").takes(one) is expected
    assert Requirement("x", f"<{two}").takes(one) is not expected


@pytest.mark.parametrize(
    ("bounds", "version", "takes"),
    [
        ("<2.0.0,>=1.21", "1.26.4", True),
        ("<2.0.0,>=1.21", "2.0", False),
        ("~=2.50", "2.73.0", True),
        ("~=2.50", "3.0", False),
        ("==0.7.0", "0.7", True),
        ("!=1.5,>1", "1.5.0", False),
        ("<=1.5", "1.5.1", False),
        ("==1.2.*", "1.2.9", True),
        ("!=1.2.*", "1.2.9", False),
        ("", "9", True),
    ],
)
def test_bounds(bounds: str, version: str, takes: bool) -> None:
    assert Requirement("x", bounds).takes(version) is takes


def test_requirements_are_those_of_the_extras() -> None:
    lines = (
        "Rich>=13.7",
        "tritonclient[grpc,http]~=2.50",
        "typing_extensions (>=4)",
        'numpy<2; extra == "engine"',
        "pytest>=8; extra == 'dev'",
        "nvidia-pytriton==0.7.0; sys_platform == 'linux' and extra == 'serve'",
        "winpty; sys_platform == 'win32' and extra == 'serve'",
        "not a requirement",
    )
    assert list(requirements(lines, ("engine", "serve"))) == [
        Requirement("rich", ">=13.7"),
        Requirement("tritonclient", "~=2.50"),
        Requirement("typing-extensions", ">=4"),
        Requirement("numpy", "<2"),
        Requirement("nvidia-pytriton", "==0.7.0"),
    ]
