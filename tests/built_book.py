"""The real book, built once for the tests of one process.

The committed notebooks hold the outputs of their defaults, so they stand for runs here: nothing is executed, and what
is tested is the book a reader gets from `make book`, with the defaults' numbers in it.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from dglab_utils.paths import ROOT
from dglab_utils.runs.book import build_book
from dglab_utils.runs.catalogue import Notebook, notebooks_in
from dglab_utils.runs.execute import Record

SOURCES = ("_config.yml", "_toc.yml", "book", "notebooks", "data", "dglab_utils")


def copy_sources(root: Path) -> Path:
    """What a book is built from, without what a build leaves there: a build for a test must not touch the checkout."""
    root.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            generated = shutil.ignore_patterns("experiments", "vendor", ".ipynb_checkpoints", "__pycache__")
            shutil.copytree(ROOT / name, root / name, ignore=generated)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, root / name)
    return root


def keep_run(notebook: Notebook, source: Path, folder: Path) -> None:
    """Files an executed notebook as a complete run."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder / f"{notebook.name}.ipynb")
    Record(
        notebook=notebook.name,
        profile="quick",
        parameters={parameter.name: parameter.default for parameter in notebook.parameters},
        started="2026-11-30T09:00:00+00:00",
        seconds=12.0,
        source_digest=notebook.digest,
    ).save(folder / f"{notebook.name}.json")


@cache
def built_book() -> Path:
    """The folder of the built book's HTML, removed when the process ends."""
    temporary = Path(tempfile.mkdtemp(prefix="dglab-book-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    root = copy_sources(temporary / "lab")
    # A checkout holds its environment, and packages bring Markdown that is no page and cannot be read as one.
    for folder in (".venv", "build"):
        (root / folder / "lib").mkdir(parents=True)
        (root / folder / "lib" / "template.md").write_text("---\n{{ card_data }}\n---\n")
    for notebook in notebooks_in(root / "notebooks"):
        keep_run(notebook, notebook.path, temporary / "quick")
    return build_book(temporary / "quick", root=root).parent
