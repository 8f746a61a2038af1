"""The one page of a check: a verdict and what it rests on, as text, as HTML, and written to files.

Knows nothing of what was checked; `check` and `check_server` fill it.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from dglab_utils.errors import LabError
from dglab_utils.paths import written

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Page:
    """What is told.

    Attributes:
        verdict: what was found, and what it means.
        lines: (what, answer).
        tables: caption to rows, the first of which are headings.
        details: more of them, too long for a terminal's page.
        everything: what JSON holds beside.
    """

    verdict: str
    lines: Sequence[tuple[str, str]]
    tables: Mapping[str, Rows]
    everything: dict[str, Any]
    details: Mapping[str, Rows] = field(default_factory=dict)


def as_text(page: Page) -> str:
    """The page for a terminal: the verdict last, where a reader of a long log looks."""
    told = [_aligned(page.lines)]
    told += [f"{caption}\n{_aligned(rows)}" for caption, rows in page.tables.items() if len(rows) > 1]
    return "\n\n".join([*told, page.verdict])


def as_json(page: Page) -> str:
    """Everything, with the versions it was made with."""
    versions = {name: version(name) for name in ("dglab-utils", "torch", "transformers")}
    told = {"verdict": page.verdict, **page.everything, "versions": versions | {"python": platform.python_version()}}
    return json.dumps(_finite(told), indent=1, allow_nan=False) + "\n"


def _finite(told: Any) -> Any:
    """The same with None for what JSON cannot say: no numbers, infinities."""
    if isinstance(told, float):
        return told if isfinite(told) else None
    if isinstance(told, dict):
        return {key: _finite(value) for key, value in told.items()}
    return [_finite(value) for value in told] if isinstance(told, (list, tuple)) else told


def as_html(page: Page) -> str:
    """The page for a browser, by itself: no script, nothing loaded."""
    lines = "".join(f'<tr><th scope="row">{escape(what)}</th><td>{escape(told)}</td></tr>' for what, told in page.lines)
    tables = "".join(
        f"<h2>{escape(caption)}</h2><div><table>{_row(rows[0], 'th')}{''.join(_row(row, 'td') for row in rows[1:])}"
        "</table></div>"
        for caption, rows in {**page.tables, **page.details}.items()
        if len(rows) > 1
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Batch check</title><style>'
        ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:56rem;"
        "padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1.1rem}th{text-align:left;font-weight:600}"
        "th,td{padding:.15rem 1rem .15rem 0;vertical-align:top}td{overflow-wrap:anywhere}div{overflow-x:auto}"
        f"</style></head><body><h1>{escape(page.verdict)}</h1><table>{lines}</table>{tables}</body></html>\n"
    )


def refuse_unwritable(*paths: Path | None) -> None:
    """Raises LabError for files that could not be written in the end, before anything is measured."""
    named = [path.resolve() for path in paths if path is not None]  # a link's file is written, not the link
    if len(set(named)) < len(named):
        raise LabError(f"{named[0]}: named twice; give each form of the page a file of its own")
    for path in named:
        if path.exists() and not path.is_file():
            raise LabError(f"{path}: no plain file; give another name")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise LabError(f"{path}: cannot be written ({error.strerror}); give another name") from None


def tell(page: Page, to_json: Path | None, to_html: Path | None) -> None:
    """Writes the page into the files that are named, then prints it, whatever the terminal can show.

    Raises:
        LabError: a file that could not be written; the others are, and the page is printed.
    """
    lost = []
    for path, text in ((to_json, as_json), (to_html, as_html)):
        if path is not None:
            try:
                with written(path.resolve()) as temporary:  # a link stays one
                    temporary.write_text(text(page), encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                lost.append(f"{path}: could not be written ({error.strerror})")
    encoding = sys.stdout.encoding or "utf-8"
    print(as_text(page).encode(encoding, "backslashreplace").decode(encoding))
    if lost:
        raise LabError("; ".join(lost))


def _aligned(rows: Rows) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
