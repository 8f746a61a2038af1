"""Figures and tables of the cost model: notebook 10.

Each takes numbers that were worked out already, or records whose fields it names, and returns a plotly figure or HTML.
Nothing here predicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dglab_utils.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure, published
from dglab_utils.report.tables import plain_table

COMPONENT_COLOURS = {
    "attention": BLUE,
    "dense MLP": SKY,
    "router and experts": GREEN,
    "LM head": ORANGE,
    "self-conditioning": PURPLE,
    "sampler": RED,
    "rest": GREY,
    "overhead": "#4D4D4D",
}


def errors_table(rows: Sequence[Any]) -> str:
    """Published against predicted, one line a row of `measure.costs_published.against_published`, none left out."""
    units = {"rate": "tok/s", "decode_rate": "tok/s", "step_ms": "ms", "request_s": "s", "speedup": "times"}
    lines = []
    for row in rows:
        told = row.published
        if row.predicted is None:
            lines.append([f"{told.what} ({told.source})", "", "", "cannot say", told.why])
            continue
        error = "fitted to it" if told.use == "calibrate" else f"{row.error:+.0%}"
        what = f"{told.what}; {told.hardware}, {told.precision} ({told.source})"
        unit = units[told.metric]
        lines.append([what, f"{_ends(told.value)} {unit}", f"{_ends(row.predicted)} {unit}", error, told.assumed])
    return plain_table(("What, and who says so", "Published", "Predicted", "Error", "Supposed, or why not"), lines)


def cost_by_component(flops: Mapping[str, Mapping[str, float]], moved: Mapping[str, Mapping[str, float]]) -> str:
    """FLOPs and bytes of several forwards (the keys) by component, and their sums."""
    headings = ["component"] + [f"{name}, {unit}" for name in flops for unit in ("GFLOP", "GB")]
    components = list(next(iter(flops.values())))
    rows = [[c] + [f"{v[c] / 1e9:,.3g}" for name in flops for v in (flops[name], moved[name])] for c in components]
    sums = [f"{sum(v.values()) / 1e9:,.4g}" for name in flops for v in (flops[name], moved[name])]
    return plain_table(headings, [*rows, ["sum", *sums]])


def step_by_component(batches: Sequence[int], steps: Sequence[Mapping[str, float]], title: str) -> go.Figure:
    """Stacked shares of a denoising step by component, one bar a batch; times in s, the last key is the overhead."""
    chart = figure(title, "rows at once", "share of a denoising step, %", height=440)
    totals = [sum(step.values()) for step in steps]
    for component in steps[0]:
        chart.add_bar(
            x=[str(batch) for batch in batches],
            y=[100 * step[component] / total for step, total in zip(steps, totals, strict=True)],
            name=component,
            marker_color=COMPONENT_COLOURS[component],
            customdata=[1e3 * step[component] for step in steps],
            hovertemplate="%{x} rows: %{customdata:.1f} ms, %{y:.0f} %<extra>" + component + "</extra>",
        )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(type="category")
    return chart


def advantage_by_batch(
    batches: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    title: str,
    *,
    measured: tuple[Sequence[int], Sequence[float], str],
    fits: int,
) -> go.Figure:
    """Speedup over that at batch 1, against the batch: predictions as lines, what was published as diamonds.

    Args:
        lines: name to speedup of each batch.
        measured: batches, speedups and name of the published ones.
        fits: the largest batch that fits into the card's memory, marked where it is on the axis.
    """
    chart = figure(title, "rows at once", "speedup, as a share of that of one row", log_x=True, log_y=True)
    for (name, values), colour in zip(lines.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        share = [value / values[0] for value in values]
        chart.add_scatter(
            x=list(batches), y=share, mode="lines+markers", line={"color": colour}, name=name, customdata=list(values)
        )
    chart.update_traces(hovertemplate="%{x} rows: %{y:.2f} of one row's, speedup %{customdata:.2f}<extra></extra>")
    at, speedups, name = measured
    chart.add_trace(published(at, [value / speedups[0] for value in speedups], name))
    if batches[0] < fits < batches[-1]:
        chart.add_vline(x=fits, line={"color": GREY, "dash": "dot"})
        # A line has no entry in the legend.
        line = {"color": GREY, "dash": "dot"}
        chart.add_scatter(x=[None], y=[None], mode="lines", line=line, name=f"memory is full: {fits} rows")
    chart.update_xaxes(tickvals=list(batches))
    return chart


def speedup_map(
    batches: Sequence[int], steps: Sequence[float], speedup: Sequence[Sequence[float]], title: str
) -> go.Figure:
    """Speedup over batch and steps; `speedup[step][batch]`, written into each cell."""
    chart = figure(title, "rows at once", "denoising steps a canvas", height=440)
    chart.add_heatmap(
        z=[[min(2.0, max(-2.0, math.log2(v))) for v in row] for row in speedup],
        x=[str(b) for b in batches],
        y=[f"{s:g}" for s in steps],
        text=[[f"{v:.1f}" if v >= 1 else f"{v:.2f}" for v in row] for row in speedup],
        texttemplate="%{text}",
        textfont={"color": "#1A1A1A"},
        # Light enough in every cell for dark figures.
        colorscale=[[0, "#F0A878"], [0.5, "#F5F5F5"], [1, "#8EC3E6"]],
        zmin=-2,
        zmax=2,
        showscale=False,
        hovertemplate="%{x} rows, %{y} steps: %{text}<extra></extra>",
    )
    chart.update_xaxes(type="category")
    chart.update_yaxes(type="category")
    return chart


def explained(names: Sequence[str], measured: Sequence[float], predicted: Sequence[float], title: str) -> go.Figure:
    """Measured and fitted times of several forwards, in ms, side by side."""
    chart = figure(title, "", "ms a forward", log_y=True)
    chart.add_bar(x=list(names), y=list(measured), name="measured here", marker_color=BLUE)
    chart.add_bar(x=list(names), y=list(predicted), name="cost model, fitted", marker_color=ORANGE)
    chart.update_layout(barmode="group")
    chart.update_xaxes(type="category")
    return chart


def _ends(ends: tuple[float, float]) -> str:
    low, high = ends
    if f"{low:.3g}" == f"{high:.3g}":
        return _number(low)
    return f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
