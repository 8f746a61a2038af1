"""HTML tables of a page: verdicts on claims, and the same figures from several machines."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from dglab_utils.errors import LabError
from dglab_utils.report.claims import CLAIMS, Claim
from dglab_utils.report.results import Results, everywhere
from dglab_utils.sampling.trace import CanvasTrace


def verdict_table(claims: Sequence[Claim] = CLAIMS, results: Results | None = None) -> str:
    """Claims with their verdicts; from one run's `results`, or from the first that exist of each experiment."""
    rows = []
    for claim in claims:
        verdict = claim.verdict(results)
        published = f"{claim.published} ({claim.source})"
        badge = f'<span class="dglab-verdict dglab-{verdict.state.replace(" ", "-")}">{verdict.state}</span>'
        cells = (claim.text, published, verdict.measured or "nothing", verdict.because)
        rows.append([badge, *map(html.escape, cells)])
    return _table("dglab-claims", ("Verdict", "Claim", "Published", "Measured", "Why"), rows)


def hosts_table(results: Results, columns: Mapping[str, tuple[str, Mapping]]) -> str:
    """This run beside the recorded runs of every host: median and, where they differ, quartiles.

    Args:
        results: this run; shown first.
        columns: heading to (name of the measurement, its labels).
    """
    runs = [("this run", results)]
    runs += [("recorded", r) for r in everywhere(results.experiment) if r.started != results.started]
    rows = []
    for kind, run in runs:
        versions = run.environment["versions"]
        where = f"{run.host} ({kind}, {run.started[:10]}, Transformers {versions['transformers']})"
        rows.append([html.escape(cell) for cell in (where, *(_cell(run, *column) for column in columns.values()))])
    return _table("dglab-hosts", ("Host", *columns), rows)


def transitions_table(traces: Mapping[str, CanvasTrace]) -> str:
    """What became of accepted and other positions from one step to the next, one row a trace (its key is its name)."""
    headings = ("", "stayed out", "newly accepted", "un-accepted", "accepted again", "share un-accepted")
    rows = [
        [html.escape(name), *(f"{n:,}" for n in trace.accept_transitions.ravel()), f"{trace.unaccepted_share:.2%}"]
        for name, trace in traces.items()
    ]
    return _table("dglab-hosts", headings, rows)


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text."""
    return _table("dglab-hosts", map(html.escape, headings), (map(html.escape, row) for row in rows))


def _cell(run: Results, name: str, labels: Mapping) -> str:
    try:
        found = run.find(name, **labels)
    except LabError:
        return "not measured"
    if "mean" in found.labels:  # of answers that are right or wrong, a median says nothing
        return f"{found.labels['mean']:.3g}, n = {found.count}"
    spread = "" if found.q1 == found.q3 else f" ({found.q1:.4g} to {found.q3:.4g})"
    return f"{found.median:.4g}{spread}, n = {found.count}"


def _table(name: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table that scrolls sideways where it is too wide; cells are HTML already."""
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="dglab-scroll" role="region" tabindex="0" aria-label="table">{table}</div>'
