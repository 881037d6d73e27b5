"""The report and the comparison as a browser shows them: sections, colours, widths, no faults, no network."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser as chromium
from tests.browser import Browser
from tests.pipeline.records import LAYERS, full, least, measured, quality
from trtforge.pipeline.compare import Compared
from trtforge.pipeline.report_pages import build_page, compare_page

SECTIONS = [
    "warnings", "pipeline", "gate", "layers", "sensitivity", "memory", "estimates", "recipe", "versions",
]  # fmt: skip
WAYS = [(width, scheme) for width in (1200, 400) for scheme in ("light", "dark")]
LONG = "/a/very/long/path/" + "without/an/end/" * 12


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all pages of this module."""
    program = chromium.find()
    if program is None:
        pytest.fail(chromium.MISSING)
    with chromium.running(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as files."""
    directory = tmp_path_factory.mktemp("pages")
    long = full(out=LONG, recipe="a-name-of-sixty-characters-that-has-no-place-to-break-it-at-all")
    texts = {
        "full": build_page(full()),
        "failed": build_page(full(verification=quality(passed=False))),
        "least": build_page(least()),
        "long": build_page(long),
        "compare": compare_page(
            [Compared.of(name, Path(LONG) / name, full()) for name in ("none", "fp8", "int4_awq")]
            + [Compared.of("old", Path("old"), least()), Compared.of("fast", Path("fast"), full(), measured())]
        ),
    }
    for name, text in texts.items():
        (directory / f"{name}.html").write_text(text)
    return directory


@pytest.mark.parametrize("page", ["full", "failed", "least", "long", "compare"])
@pytest.mark.parametrize(("width", "scheme"), WAYS)
def test_pages_fit_and_have_no_faults(browser: Browser, pages: Path, page: str, width: int, scheme: str) -> None:
    browser.open(pages / f"{page}.html", width=width, scheme=scheme)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)"
    assert browser.value(f"{wide}.map(e => e.tagName + ' ' + e.textContent.slice(0, 40))") == []
    assert browser.faults == []
    assert browser.value("document.scripts.length") == 0


@pytest.mark.parametrize("width", [1200, 400])
def test_text_is_readable_in_both_schemes(browser: Browser, pages: Path, width: int) -> None:
    """WCAG's contrast of the text with the page is at least 4.5, and text has at least 11 pixels."""
    backgrounds = set()
    for scheme in ("light", "dark"):
        browser.open(pages / "full.html", width=width, scheme=scheme)
        body = "getComputedStyle(document.body)"
        colours = [browser.value(f"{body}.color"), browser.value(f"{body}.backgroundColor")]
        backgrounds.add(colours[1])
        assert contrast(*colours) >= 4.5
        muted = browser.value("getComputedStyle(document.querySelector('.about')).color")
        assert contrast(muted, colours[1]) >= 4.5
        sizes = "[...document.querySelectorAll('main *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        assert browser.value(f"Math.min(...{sizes})") >= 11
        drawn = "document.querySelector('#estimates svg text').getBoundingClientRect().height"
        assert browser.value(drawn) >= 10
    assert len(backgrounds) == 2


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two colours as browsers write them: rgb(r, g, b)."""

    def luminance(colour: str) -> float:
        values = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_full_report_has_every_section(browser: Browser, pages: Path) -> None:
    browser.open(pages / "full.html")
    assert browser.value("[...document.querySelectorAll('section')].map(s => s.id)") == SECTIONS
    assert browser.value("document.title") == "llama-3.1-8b-fp8: passed"
    assert browser.value("document.querySelectorAll('#pipeline tbody tr').length") == 5
    assert browser.value("document.querySelectorAll('#layers svg').length") == 3
    assert browser.value("document.querySelectorAll('#layers svg')[0].querySelectorAll('rect').length") == LAYERS
    assert browser.value("document.querySelectorAll('#estimates polyline').length") == 3
    assert browser.value("document.querySelectorAll('#memory .gpu').length") == 2
    assert browser.value("document.querySelector('#warnings b')") is None  # the warning's <b> is text
    verdicts = "[...document.querySelectorAll('#gate tbody tr td:last-child')].map(e => e.textContent.trim())"
    assert browser.value(verdicts) == ["passed", "passed", "no limit"]


def test_a_failed_gate_is_seen_first(browser: Browser, pages: Path) -> None:
    browser.open(pages / "failed.html")
    assert browser.value("document.querySelector('.badge').textContent") == "failed"
    assert "failed" in browser.value("document.querySelector('#pipeline tbody').textContent")
    assert browser.value("document.querySelector('#gate tbody tr td:last-child').textContent") == "failed"


def test_sections_without_data_are_absent(browser: Browser, pages: Path) -> None:
    browser.open(pages / "least.html")
    assert browser.value("[...document.querySelectorAll('section')].map(s => s.id)") == ["pipeline"]


def test_stacked_bars_are_as_wide_as_their_shares(browser: Browser, pages: Path) -> None:
    browser.open(pages / "full.html")
    bar = "document.querySelector('.stack')"
    part = f"{bar}.querySelector('.part-kv_pool').getBoundingClientRect().width"
    shares = browser.value(f"{part} / {bar}.getBoundingClientRect().width")
    assert shares == pytest.approx(66 / 85, abs=0.005)
    assert browser.value(f"getComputedStyle({bar}.querySelector('.part-kv_pool')).fill") != "rgb(0, 0, 0)"


def test_a_comparison_has_every_build(browser: Browser, pages: Path) -> None:
    browser.open(pages / "compare.html")
    names = "[...document.querySelectorAll('#builds tbody th')].map(e => e.firstChild.textContent.trim())"
    assert browser.value(names) == ["none", "fp8", "int4_awq", "old", "fast"]
    ids = ["builds", "size", "perplexity", "divergence", "agreement", "speed", "measured", "latency", "conditions"]
    assert browser.value("[...document.querySelectorAll('section')].map(s => s.id)") == ids
