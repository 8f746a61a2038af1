"""Every page of the built book, opened from disk in Chromium as a reader without a network does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built_book import built_book

pytestmark = pytest.mark.timeout(240)

# Stricter than what other browser tests allow: a page from disk has no business with any server.
LOCAL = ("file:", "data:", "blob:")


@pytest.fixture(scope="module")
def book() -> Path:
    return built_book()


class Visit:
    """A tab in one theme and width that writes down whatever goes wrong."""

    def __init__(self, browser: Any, theme: str = "light", width: int = 1200) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce")
        self.context.add_init_script(
            f"localStorage.setItem('mode', '{theme}'); localStorage.setItem('theme', '{theme}')"
        )
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("request", lambda r: r.url.startswith(LOCAL) or self.faults.append(f"request: {r.url}"))
        self.page.on("requestfailed", lambda r: self.faults.append(f"not loaded: {r.url}"))
        self.page.on("console", lambda m: m.type == "error" and self.faults.append(f"console: {m.text}"))
        self.page.on("pageerror", lambda e: self.faults.append(f"error: {e}"))

    def open(self, path: Path) -> Any:
        self.page.goto(path.as_uri())
        self.page.wait_for_load_state("load")
        return self.page

    def draw_all(self) -> int:
        """Scrolls to every plotly figure, waits until each is drawn; how many there are."""
        plots = self.page.locator("div.dglab-plot")
        for i in range(plots.count()):
            plots.nth(i).scroll_into_view_if_needed()
            self.page.wait_for_function("i => document.querySelectorAll('div.dglab-plot')[i].dataset.drawn", arg=i)
        return plots.count()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    visits: list[Visit] = []

    def start(**settings: Any) -> Visit:
        visits.append(Visit(chromium, **settings))
        return visits[-1]

    yield start
    for one in visits:
        one.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_opens_from_disk_without_a_fault(book, visit, theme):
    tab = visit(theme=theme)
    front = book / "index.html"  # it only leads on, to the landing page: see the next test
    pages = [path for path in sorted(book.rglob("*.html")) if path != front]
    assert len(pages) > 5
    for path in pages:
        page = tab.open(path)
        tab.draw_all()
        assert tab.faults == [], path.relative_to(book)
        assert page.evaluate("document.documentElement.dataset.theme") == theme, path.name


def test_the_front_page_leads_to_the_landing_page(book, visit):
    page = visit().open(book / "index.html")
    page.wait_for_url("**/book/index.html")
    assert "DiffusionGemma Lab" in page.locator("h1").first.inner_text()


def test_no_page_scrolls_sideways_on_a_phone(book, visit):
    tab = visit(width=390)
    for path in sorted((book / "book").rglob("*.html")):
        page = tab.open(path)
        tab.draw_all()
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{path.name} is {wide} px wider than the screen"


def test_figures_are_drawn_and_follow_the_theme(book, visit):
    """Legible in both: the text of a figure has the page's text colour, and changes with it without a reload."""
    tab = visit(theme="light")
    drawn = 0
    for path in sorted((book / "book" / "experiments").glob("*.html")):
        page = tab.open(path)
        figures = tab.draw_all()
        if figures:
            drawn += figures
            assert page.locator("div.dglab-plot svg.main-svg").count() >= figures
            assert colours(page) == colours(page, "body"), "axis labels have the page's colour"
            light = colours(page)
            page.evaluate("document.documentElement.dataset.theme = 'dark'")
            page.wait_for_function(
                "light => getComputedStyle(document.querySelector('div.dglab-plot .xtick text')).fill !== light",
                arg=light,
            )
            assert colours(page) == colours(page, "body")
    assert drawn, "no chapter has a plotly figure"
    assert tab.faults == []


def test_a_figure_follows_its_column(book, visit):
    tab = visit()
    page = tab.open(book / "book" / "experiments" / "01_untrained_model.html")
    tab.draw_all()
    page.evaluate("document.querySelector('.bd-article').style.maxWidth = '420px'")
    widths = "[...document.querySelectorAll('.dglab-plot')].map((plot) => [plot.clientWidth, plot._fullLayout.width])"
    page.wait_for_function(f"{widths}.every(([column, figure]) => column < 430 && figure === column)")
    assert not tab.faults


def test_plotly_is_loaded_only_where_a_figure_comes_near(book, visit):
    tab = visit()
    loaded: list[str] = []
    tab.page.on("request", lambda r: "plotly.min.js" in r.url and loaded.append(r.url))
    page = tab.open(book / "book" / "rerun.html")
    page.wait_for_timeout(300)
    assert loaded == []


def test_html_outputs_are_not_painted_white_in_the_dark(book, visit):
    tab = visit(theme="dark")
    seen = 0
    for path in sorted((book / "book" / "experiments").glob("*.html")):
        page = tab.open(path)
        for background in page.eval_on_selector_all(
            "div.cell_output .text_html", "all => all.map(e => getComputedStyle(e).backgroundColor)"
        ):
            seen += 1
            assert background == "rgba(0, 0, 0, 0)", path.name
    assert seen, "no chapter has an HTML output"


def colours(page: Any, selector: str = "div.dglab-plot .xtick text") -> str:
    """Computed text colour of the first match: `fill` in a figure, `color` elsewhere."""
    attribute = "fill" if "plot" in selector else "color"
    return page.eval_on_selector(selector, f"e => getComputedStyle(e).{attribute}")
