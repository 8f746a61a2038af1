"""Builds the book from saved runs: gate, pages, local libraries, Sphinx; and refuses rather than publish a doubt.

The gate is the lab's own: Jupyter Book publishes a notebook that holds a traceback without a word. Every problem is
one line; any of them means no book. A build is always made afresh (an incremental one does not repeat the warnings of
pages that did not change), under a temporary name, and replaces the last book only when it is whole.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dglab_utils.errors import LabError
from dglab_utils.paths import ROOT, written
from dglab_utils.runs.catalogue import Notebook, notebooks_in

EXPERIMENTS = "book/experiments"
VENDOR = "book/_static/vendor"


class BookError(LabError):
    """Something that must not become a book; one line a problem."""

    exit_status = 1

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def build_book(runs: Path, root: Path = ROOT, out: Path | None = None) -> Path:
    """Publishes the runs of one profile and builds the book.

    Args:
        runs: their folder, such as build/runs/quick.
        root: holds `_config.yml`, `_toc.yml`, book/ and notebooks/.
        out: the HTML's folder; `_build/html` under the root where none is given. Replaced as a whole.

    Returns:
        The book's first page.

    Raises:
        BookError: a run that may not be published, a notebook outside the table of contents, or a Sphinx warning.
    """
    from dglab_utils.runs.execute import fault_of_run
    from dglab_utils.runs.publish import publish

    out = out or root / "_build" / "html"
    notebooks = notebooks_in(root / "notebooks")
    problems = [*_not_listed(notebooks, root), *filter(None, (fault_of_run(notebook, runs) for notebook in notebooks))]
    if problems:
        raise BookError(problems)
    shutil.rmtree(root / EXPERIMENTS, ignore_errors=True)  # pages of notebooks that are no more
    for notebook in notebooks:
        publish(notebook, runs, root / EXPERIMENTS / f"{notebook.name}.ipynb")
    copy_libraries(root / VENDOR)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".book-", dir=out.parent) as temporary:
        _sphinx(root, Path(temporary))
        _replace(Path(temporary) / "_build" / "html", out)
    return out / "index.html"


def copy_libraries(vendor: Path) -> None:
    """Copies the JavaScript that pages load from installed packages, so that no page asks the network for it."""
    sources = {
        "plotly.min.js": files("plotly") / "package_data" / "plotly.min.js",
        # django-static-mathjax: used for its files alone, Django is not installed.
        "tex-svg.js": files("mathjax") / "static" / "mathjax" / "es5" / "tex-svg.js",
    }
    static = files("dglab_utils.report") / "static"
    sources |= {entry.name: entry for entry in static.iterdir() if entry.name.endswith((".js", ".css"))}
    shutil.rmtree(vendor, ignore_errors=True)
    vendor.mkdir(parents=True)
    for name, source in sources.items():
        if not source.is_file():
            raise BookError([f"{source}: missing from the environment; install it again (`make`)"])
        (vendor / name).write_bytes(source.read_bytes())


def _not_listed(notebooks: Iterable[Notebook], root: Path) -> list[str]:
    """One line for each notebook without a place in the table of contents, and for each place without a notebook."""
    toc = root / "_toc.yml"
    listed = {
        path.rpartition("/")[2]
        for path in _paths(yaml.safe_load(toc.read_text(encoding="utf-8")))
        if path.startswith(EXPERIMENTS)
    }
    there = {notebook.name for notebook in notebooks}
    return [
        f"{name}: not in {toc}; add `- file: {EXPERIMENTS}/{name}` under a part" for name in sorted(there - listed)
    ] + [
        f"{toc}: lists {EXPERIMENTS}/{name}, but there is no notebooks/{name}.ipynb" for name in sorted(listed - there)
    ]


def _paths(node: Any) -> Iterable[str]:
    """Every `file:` and `root:` of a table of contents."""
    if isinstance(node, list):
        for child in node:
            yield from _paths(child)
    elif isinstance(node, dict):
        for key, child in node.items():
            if key in ("file", "root"):
                yield child
            else:
                yield from _paths(child)


def _sphinx(root: Path, out: Path) -> None:
    """Runs Jupyter Book; every warning is an error, and all of them are told."""
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(root)]
    command += ["--path-output", str(out), "-W", "-n", "--keep-going", "--all", "-q"]
    # No colours: the warnings are searched for below.
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)
    warnings = list(
        dict.fromkeys(line for line in text.splitlines() if re.search(r"\b(WARNING|ERROR|CRITICAL)\b", line))
    )
    if warnings:
        raise BookError(line.replace(f"{root}/", "") for line in warnings)
    if done.returncode or not (out / "_build" / "html" / "index.html").is_file():
        log = root / "build" / "book.log"
        with written(log) as temporary:
            temporary.write_text(done.stdout + text, encoding="utf-8")
        # What Sphinx said before Jupyter Book's own "there was an error".
        causes = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception): .", line)] or ["no message"]
        raise BookError([f"Jupyter Book ended with status {done.returncode}: {causes[-1]}; all it said is in {log}"])


def _replace(new: Path, old: Path) -> None:
    """Moves a built book to where the last one is; a reader of the old one loses it only when the new one is there."""
    aside = old.with_name(f".{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if old.exists():
        os.replace(old, aside)
    os.replace(new, old)
    shutil.rmtree(aside, ignore_errors=True)
