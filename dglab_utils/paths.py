"""Where the lab's files are, and how a file is written.

papermill runs notebooks in the process's working directory and nbval in the notebook's own, so nothing may
depend on the working directory: paths are resolved from the checkout that this package was installed from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PROFILES = NOTEBOOKS / "profiles"
BOOK = ROOT / "book"
DATA = ROOT / "data"
REFERENCE = DATA / "reference"
MODELS = DATA / "models"
RECORDED_RESULTS = DATA / "results"
BUILD = ROOT / "build"
FRESH_RESULTS = BUILD / "results"


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`; renames it to `path` on success, removes it on any error.

    A reader never sees half a file, and a failed write leaves what was there before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix is kept at the end: libraries such as numpy append theirs to a name that lacks it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
