"""What the book adds to Sphinx: numbers and verdicts from results, the files its pages load, two things of the theme's.

No measured number is typed into prose. The role quotes one measurement and the directive judges the claims, both from
the results of this checkout (this machine's fresh run first, then the recorded hosts):

    {result}`02_commit_waves steps study=first_lab growth=1.0`          18 steps
    {result}`02_commit_waves accepted_per_step bound=0.1 :.1f`          45.9; a format of one's own
    ```{verdicts} 02_commit_waves                                       a table; all claims where no notebook is named
    ```

A quotation that finds nothing is a Sphinx warning, which `dglab book` refuses.

Pages load classic scripts with `defer`: they work from file://, and do not hold up the text.
"""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from dglab_utils import __version__
from dglab_utils.errors import LabError
from dglab_utils.measure import Measurement
from dglab_utils.report import results
from dglab_utils.report.claims import CLAIMS
from dglab_utils.report.tables import verdict_table
from dglab_utils.runs.catalogue import load_yaml

logger = logging.getLogger(__name__)
_PRELOAD = re.compile(r'[ \t]*<link\b[^>]*\brel="preload"[^>]*>\n?')


class ResultRole(SphinxRole):
    """Quotes a measurement: its median and unit, quartiles where they differ, the rest on hover."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """The quotation as an abbreviation, whose explanation says where the number comes from."""
        try:
            shown, explanation = quoted(self.text)
        except LabError as error:
            logger.warning("{result}`%s`: %s", self.text, error, location=self.get_location())
            return [nodes.emphasis(text="no result")], []
        return [nodes.abbreviation(shown, shown, explanation=explanation, classes=["dglab-result"])], []


class VerdictsDirective(SphinxDirective):
    """The table of claims with their verdicts, computed when the page is built."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table as HTML; a warning where no claim belongs to the notebook named."""
        claims = tuple(c for c in CLAIMS if not self.arguments or c.experiment == self.arguments[0])
        if not claims:
            logger.warning("{verdicts}: no claim belongs to %s", self.arguments[0], location=self.get_location())
            return []
        try:
            return [nodes.raw("", verdict_table(claims), format="html")]
        except LabError as error:
            logger.warning("{verdicts}: %s", error, location=self.get_location())
            return []


def quoted(query: str) -> tuple[str, str]:
    """(text, explanation) of the measurement that `EXPERIMENT NAME [label=value ...] [:format]` names.

    A value with spaces stands in quotation marks.

    Raises:
        LabError: the query cannot be read, or the results have no such measurement, or several.
    """
    try:
        words = shlex.split(query)
    except ValueError as error:
        raise LabError(f"{query!r} cannot be read ({error})") from None
    form = words.pop()[1:] if len(words) > 2 and words[-1].startswith(":") else "{auto}"
    if len(words) < 2 or any("=" not in word for word in words[2:]):
        raise LabError("write EXPERIMENT NAME [label=value ...] [:format]")
    experiment, name, *pairs = words
    labels = {key: load_yaml(text) for key, _, text in (pair.partition("=") for pair in pairs)}
    measurement, run = results.quoted(experiment, name, **labels)
    return _in_words(measurement, form), (
        f"{name}, {', '.join(f'{k} {v}' for k, v in measurement.labels.items()) or 'no labels'}: median of "
        f"{measurement.count}, measured on {run.host}"
    )


def _in_words(measurement: Measurement, form: str) -> str:
    def text(number: float) -> str:
        try:
            return f"{number:,.4g}" if form == "{auto}" else format(number, form)
        except ValueError as error:
            raise LabError(f"`:{form}` is no number format ({error}); write one such as :.1f") from None

    middle, low, high = (text(x) for x in (measurement.median, measurement.q1, measurement.q3))
    spread = "" if low == high else f" ({low}–{high})"
    return f"{middle}{spread} {measurement.unit}".rstrip()


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's entry point."""
    app.add_role("result", ResultRole())
    app.add_directive("verdicts", VerdictsDirective)
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
