"""Headless Chromium for the tests of pages; without it they are skipped, with the reason, and fail where
DGLAB_REQUIRE_BROWSER is set (continuous integration).

A page under test makes no request that leaves the machine and raises no error: both are checked when it is closed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOCAL = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:", "ws://127.0.0.1:")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A browser with a fresh profile. CHROMIUM names another executable."""
    name = os.environ.get("CHROMIUM", "chromium")
    executable = shutil.which(name)
    if executable is None:
        missing = f"no {name} on PATH: install Chromium, or name it in CHROMIUM"
        if os.environ.get("DGLAB_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """open_page(html or URL, width=1200, theme="light", motion="no-preference") -> a playwright page."""
    pages, errors, outside = [], [], []

    def opened(
        source: str, width: int = 1200, theme: str = "light", motion: str = "no-preference", javascript: bool = True
    ) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            reduced_motion=motion,
            java_script_enabled=javascript,
        )
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: request.url.startswith(LOCAL) or outside.append(request.url))
        if not source.startswith(LOCAL):
            file = tmp_path / f"page{len(pages)}.html"
            file.write_text(source, encoding="utf-8")
            source = file.as_uri()
        page.goto(source)
        pages.append(context)
        return page

    yield opened
    for context in pages:
        context.close()
    assert not errors, f"the page raised {errors}"
    assert not outside, f"the page asked for {outside}"
