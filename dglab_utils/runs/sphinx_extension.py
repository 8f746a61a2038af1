"""What the book adds to Sphinx: the files its pages load, and the removal of two things of the theme's.

Pages load classic scripts with `defer`: they work from file://, and do not hold up the text.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from dglab_utils import __version__

_PRELOAD = re.compile(r'[ \t]*<link\b[^>]*\brel="preload"[^>]*>\n?')


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's entry point."""
    app.add_css_file("book.css")
    app.add_js_file("dglab_plots.js", defer="defer")
    for name in sorted(entry.name for entry in (files("dglab_utils.report") / "static").iterdir()):
        if name.endswith(".js"):
            app.add_js_file(f"vendor/{name}", defer="defer")
        elif name.endswith(".css"):
            app.add_css_file(f"vendor/{name}")
    app.connect("build-finished", _tidy)
    return {"version": __version__, "parallel_read_safe": True, "parallel_write_safe": True}


def _tidy(app: Sphinx, error: Exception | None) -> None:
    """Takes out of the built pages what cannot work from file:// or is no page.

    The theme preloads its icon fonts across origins, which a browser refuses for files (the icons are drawn as SVG
    anyway), and leaves its own templates among the static files.
    """
    if error is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for template in (out / "_static").glob("*-macros.html"):
        template.unlink()
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if (tidied := _PRELOAD.sub("", text)) != text:
            page.write_text(tidied, encoding="utf-8")
