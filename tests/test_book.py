"""The built book: links, anchors, sizes, nothing from elsewhere; and what is refused before there is a book."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup
from built_book import built_book, copy_sources, keep_run
from small_notebooks import write_notebook

from dglab_utils.paths import ROOT
from dglab_utils.runs.book import BookError, build_book, copy_libraries
from dglab_utils.runs.catalogue import notebooks_in, read_notebook

pytestmark = pytest.mark.timeout(240)

CHAPTER_LIMIT = 300_000  # bytes, gzipped, without the plotly and MathJax bundles
BUNDLES = ("plotly.min.js", "tex-svg.js")
# Attributes with which a page makes a browser fetch something, without the reader asking for it.
FETCHES = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}


@pytest.fixture(scope="module")
def book() -> Path:
    return built_book()


def pages(book: Path) -> list[Path]:
    return sorted(book.rglob("*.html"))


def soup(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def fetched(page: BeautifulSoup) -> Iterator[str]:
    """What a browser loads with the page."""
    for tag, attribute in FETCHES.items():
        yield from (element[attribute] for element in page.find_all(tag) if element.get(attribute))
    for link in page.find_all("link"):
        if {"stylesheet", "preload", "icon", "preconnect", "dns-prefetch", "modulepreload"} & set(link.get("rel", [])):
            yield link["href"]


def broken_links(book: Path) -> list[str]:
    """Links inside the book whose file or anchor is not there."""
    ids = {page.resolve(): {e["id"] for e in soup(page).find_all(id=True)} for page in pages(book)}
    broken = []
    for page in pages(book):
        for anchor in soup(page).find_all("a", href=True):
            target = urlsplit(anchor["href"])
            if target.scheme or target.netloc:
                continue
            file = (page.parent / unquote(target.path)).resolve() if target.path else page.resolve()
            if not file.is_file():
                broken.append(f"{page.relative_to(book)}: {anchor['href']}: no such file")
            elif target.fragment and file in ids and unquote(target.fragment) not in ids[file] | {"", "top"}:
                broken.append(f"{page.relative_to(book)}: {anchor['href']}: no such anchor")
    return broken


def test_no_link_or_anchor_is_broken(book):
    assert broken_links(book) == []


def test_the_link_checker_finds_what_is_broken(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a><a href="#y">2</a><a href="c.html">3</a><p id="z">')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#z">4</a><a href="https://example.org/#n">5</a>')
    assert broken_links(tmp_path) == [
        "a.html: b.html#x: no such anchor",
        "a.html: #y: no such anchor",
        "a.html: c.html: no such file",
    ]


def test_every_file_a_page_loads_is_in_the_book(book):
    for page in pages(book):
        for reference in fetched(soup(page)):
            target = urlsplit(reference)
            assert target.scheme in ("", "data"), f"{page.name} loads {reference}"
            assert not target.netloc, f"{page.name} loads {reference}"
            if not target.scheme:
                assert (page.parent / unquote(target.path)).is_file(), (
                    f"{page.name} loads {reference}, which is not there"
                )


def test_no_style_sheet_of_the_book_loads_from_elsewhere(book):
    for sheet in book.rglob("*.css"):
        found = re.findall(r"(?:@import|url\()\s*['\"]?((?:https?:)?//[^'\")\s]+)", sheet.read_text(encoding="utf-8"))
        assert not found, f"{sheet.name}: {found}"


def test_a_page_without_its_bundles_is_small(book):
    """A chapter and the scripts and styles that only this book adds; the theme's files are shared by every page."""
    for page in pages(book):
        own = [page.parent / unquote(urlsplit(r).path) for r in fetched(soup(page)) if not r.startswith("data:")]
        own = [file for file in own if file.parent.name == "vendor" or file.parent == book / "_static"]
        size = sum(len(gzip.compress(f.read_bytes())) for f in [page, *own] if f.name not in BUNDLES)
        assert size <= CHAPTER_LIMIT, f"{page.relative_to(book)}: {size} bytes gzipped"


def test_every_experiment_is_a_page_that_says_how_it_was_made(book):
    notebooks = notebooks_in()
    assert notebooks
    for notebook in notebooks:
        page = soup(book / "book" / "experiments" / f"{notebook.name}.html")
        text = " ".join(page.find("article").get_text().split())
        assert "How this page was made." in text and f"dglab run {notebook.name}" in text
        assert f"complete: {notebook.name}" not in text, "the marker is for the machine"
        assert notebook.question in page.find("h1").get_text()
        assert list(book.glob(f"_downloads/*/{notebook.name}.ipynb")), "the notebook itself can be downloaded"
    published = {page.stem for page in (book / "book" / "experiments").glob("*.html")}
    assert published == {notebook.name for notebook in notebooks}


def test_every_figure_has_a_name_and_every_page_a_language(book):
    for page in pages(book):
        if page == book / "index.html":  # only leads on to the landing page
            continue
        content = soup(page)
        assert content.find("html").get("lang"), page.name
        for image in content.find_all("img"):
            assert image.get("alt") is not None, f"{page.name}: {image.get('src')} has no alternative text"
        for plot in content.find_all(class_="dglab-plot"):
            assert plot["role"] == "img" and plot["aria-label"] not in ("", "Figure"), (
                f"{page.name}: a figure without a title"
            )


# -- the gate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A small lab: two notebooks in the table of contents, the first one with a complete run."""
    for name in ("01_a", "02_b"):
        write_notebook(tmp_path / "notebooks", name)
    toc = "format: jb-book\nroot: book/index\nchapters:\n- file: book/experiments/01_a\n- file: book/experiments/02_b\n"
    (tmp_path / "_toc.yml").write_text(toc)
    keep(tmp_path, "01_a")
    return tmp_path


def keep(lab: Path, name: str, failing: bool = False) -> None:
    """A run as execution leaves it: the marker printed, or an error in its place."""
    import nbformat

    path = lab / "notebooks" / f"{name}.ipynb"
    executed = nbformat.read(path, as_version=4)
    printed = nbformat.v4.new_output("stream", name="stdout", text=f"complete: {name}\n")
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])
    executed.cells[-1].outputs = [printed, error] if failing else [printed]
    source = lab / f"{name}.executed.ipynb"
    nbformat.write(executed, source)
    keep_run(read_notebook(path), source, lab / "quick")


def refused(lab: Path) -> list[str]:
    with pytest.raises(BookError) as caught:
        build_book(lab / "quick", root=lab, out=lab / "html")
    assert caught.value.exit_status == 1 and not (lab / "html").exists() and not (lab / "book").exists()
    return caught.value.problems


def test_a_missing_run_is_refused(lab):
    assert refused(lab) == ["02_b: not run with the profile 'quick'; run `dglab run 02_b --profile quick`"]


def test_a_run_with_an_error_in_it_is_refused(lab):
    keep(lab, "02_b", failing=True)
    assert refused(lab) == ["02_b: cell 2: ValueError: no; run `dglab run 02_b --profile quick`"]


def test_stale_unfinished_and_unlisted_notebooks_are_refused_all_at_once(lab):
    keep(lab, "02_b")
    (lab / "quick" / "01_a.1.partial.ipynb").write_text("{}")
    path = lab / "notebooks" / "02_b.ipynb"
    path.write_text(path.read_text().replace("how many", "how very many"))
    write_notebook(lab / "notebooks", "03_c")
    problems = refused(lab)
    assert len(problems) == 4
    assert problems[0].startswith("03_c: not in ") and "add `- file: book/experiments/03_c`" in problems[0]
    assert "01_a: its latest run has not ended" in problems[1]
    assert "02_b: its run is older than the notebook" in problems[2]
    assert problems[3].startswith("03_c: not run")


def test_a_listed_page_without_a_notebook_is_refused(lab):
    keep(lab, "02_b")
    (lab / "notebooks" / "02_b.ipynb").unlink()
    assert any("lists book/experiments/02_b, but there is no notebooks/02_b.ipynb" in p for p in refused(lab))


def test_a_sphinx_warning_is_refused_and_the_last_book_stays(tmp_path):
    root = copy_sources(tmp_path / "lab")
    for notebook in notebooks_in(root / "notebooks"):
        keep_run(notebook, notebook.path, tmp_path / "quick")
    rerun = root / "book" / "rerun.md"
    rerun.write_text(
        rerun.read_text(encoding="utf-8") + "\n[nowhere](missing.md) {cite:p}`nobody` {result}`99_none steps`\n",
        encoding="utf-8",
    )
    last = tmp_path / "html" / "index.html"
    last.parent.mkdir()
    last.write_text("the last book")
    with pytest.raises(BookError) as caught:
        build_book(tmp_path / "quick", root=root, out=tmp_path / "html")
    assert any(p.startswith("book/rerun.md") and "missing.md" in p for p in caught.value.problems), (
        caught.value.problems
    )
    assert any("nobody" in p for p in caught.value.problems)
    assert any("99_none: no results yet" in p for p in caught.value.problems), "a number nobody measured ends the build"
    assert last.read_text() == "the last book" and [p.name for p in last.parent.iterdir()] == ["index.html"]
    assert not list(tmp_path.glob(".book-*")), "nothing half built is left"


def test_the_libraries_are_copied_from_installed_packages(tmp_path):
    copy_libraries(tmp_path / "vendor")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "vendor").iterdir()}
    assert sizes["plotly.min.js"] > 1_000_000 and sizes["tex-svg.js"] > 500_000
    scripts = {path.name for path in (ROOT / "dglab_utils" / "report" / "static").glob("*.js")}
    assert scripts and scripts <= set(sizes)
