"""Figures of what decoding costs: notebooks 03 (one size, both ways) and 04 (sizes, batches, components).

Each takes results that exist already and returns a plotly figure; nothing here measures. Costs are measurements called
`cost`, in ms, with the labels `work` (such as `canvas step`), `shape`, `batch` and `context`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from dglab_utils.errors import LabError
from dglab_utils.measure.records import Measurement
from dglab_utils.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TEMPLATE,
    figure,
    published,
    spread,
)
from dglab_utils.report.results import Results, everywhere

STEPS = range(1, 49)
TYPICAL = (12, 16)  # denoising steps a canvas that the vendor calls typical (data/reference/released_model.yaml)
LINES = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
# Seven components, in the order of the step, lightest contrast last.
_COMPONENT_COLOURS = (BLUE, SKY, GREEN, ORANGE, PURPLE, RED, GREY)


def costs_by_scope(results: Results, shape: str) -> go.Figure:
    """Milliseconds of a canvas step and of a token, for each scope, and the floor that no arithmetic explains."""
    scopes = {"layers alone": "body", "with LM head": "forward", "whole step": "step"}
    found = {way: [results.find("cost", work=f"{way} {s}", shape=shape) for s in scopes.values()] for way in _WAYS}
    factor = found["canvas"][-1].median / found["token"][-1].median
    # Empty layers may come out dearer than a model as small: then all of a token is overhead.
    share = min(1.0, results.find("floor", work="token step").median / found["token"][-1].median)
    chart = figure(
        f"A denoising step costs {factor:.1f} tokens; {share:.0%} of a token's time is no arithmetic",
        "",
        "ms (log scale)",
        log_y=True,
    )
    for way, colour in zip(_WAYS, (BLUE, ORANGE), strict=True):
        name = "canvas of 256, one denoising step" if way == "canvas" else "one autoregressive token"
        chart.add_trace(_bars(list(scopes), found[way], name, colour))
        floor = results.find("floor", work=f"{way} step").median
        line = {"color": colour, "dash": "dot"}
        chart.add_scatter(
            x=list(scopes), y=[floor] * 3, mode="lines", line=line, name=f"floor of a {way}'s step: empty layers"
        )
    chart.update_xaxes(type="category")
    return chart


_WAYS = ("canvas", "token")


def speedup_by_steps(results: Results, shape: str, reference: Mapping) -> go.Figure:
    """Speedup of a canvas over as many tokens against its steps; other hosts and the first lab beside it."""
    token, canvas, append = (results.find("cost", work=w, shape=shape).median for w in _FULL)
    even = 256 * token / canvas
    low, high = (256 * token / (n * canvas + append) for n in reversed(TYPICAL))
    if low >= 1:
        told = f"At {TYPICAL[0]} to {TYPICAL[1]} steps a canvas this machine gains {low:.1f} to {high:.1f} times"
    else:
        told = f"At {TYPICAL[0]} to {TYPICAL[1]} steps block diffusion runs at {low:.2f} to {high:.2f} times the speed"
    chart = figure(told, "denoising steps a canvas", "speedup over autoregression (log scale)", log_y=True)
    at = list(STEPS)
    chart.add_vrect(x0=TYPICAL[0], x1=TYPICAL[1], fillcolor=GREEN, opacity=0.15, line_width=0)
    chart.add_scatter(x=[1, 48], y=[1, 1], mode="lines", line={"color": GREY, "dash": "dot"}, name="no gain")
    chart.add_scatter(x=at, y=[even / n for n in at], mode="lines", line={"color": BLUE}, name="this run")
    with_append = [256 * token / (n * canvas + append) for n in at]
    dashed = {"color": BLUE, "dash": "dash"}
    chart.add_scatter(x=at, y=with_append, mode="lines", line=dashed, name="with reading the canvas into the cache")
    for run, colour in zip(_others(results), (PURPLE, SKY, ORANGE), strict=False):
        try:
            theirs = [run.find("cost", work=w, shape=shape).median for w in _FULL[:2]]
        except LabError:  # a run of another shape
            continue
        values = [256 * theirs[0] / (n * theirs[1]) for n in at]
        chart.add_scatter(x=at, y=values, mode="lines", line={"color": colour}, name=f"{run.host}, recorded")
    marks = reference["speedup_at_steps"]
    chart.add_trace(published(list(marks), list(marks.values()), "first lab"))
    chart.update_xaxes(range=[0, 49])
    return chart


_FULL = ("token step", "canvas step", "append")


def ratio_by_size(results: Results, shapes: Mapping[str, float], reference: Mapping) -> go.Figure:
    """Canvas step over token against size, batch 1; `shapes` gives millions of parameters."""
    there = {name: m for name in shapes if (m := _ratio(results, study="size", shape=name))}
    medians = [m.median for m in there.values()]
    told = f"From {min(shapes.values()):.0f}M to {max(shapes.values()):.0f}M a step costs "
    told += f"{min(medians):.0f} to {max(medians):.0f} tokens" if medians else "what was not measured"
    chart = figure(told, "parameters, millions", "canvas step / token (log scale)", log_x=True, log_y=True)
    chart.add_trace(_line([shapes[name] for name in there], list(there.values()), "measured here", BLUE))
    _add_others(chart, results, lambda run: {shapes[n]: m for n in shapes if (m := _ratio(run, study="size", shape=n))})
    marks = {shapes[name]: value for name, value in reference["size_to_ratio"].items() if name in shapes}
    chart.add_trace(published(list(marks), list(marks.values()), "first lab"))
    chart.update_xaxes(tickvals=list(shapes.values()), ticktext=[f"{m:.0f}" for m in shapes.values()])
    return chart


def ratio_by_batch(
    results: Results, study: str, label: str, values: Sequence, batches: Sequence[int], reference: Mapping | None = None
) -> go.Figure:
    """Canvas step over token against batch, one line a value of `label`; `reference` maps batch to ratio."""
    lines = {
        value: {b: m for b in batches if (m := _ratio(results, study=study, batch=b, **{label: value}))}
        for value in values
    }
    measured = {value: line for value, line in lines.items() if len(line) > 1}
    if measured:
        value, line = next(iter(measured.items()))
        (first, *_, last) = line.items()
        told = (
            f"From batch {first[0]} to {last[0]} the price of a step goes from {first[1].median:.1f} to "
            f"{last[1].median:.1f} tokens ({label} {value})"
        )
    else:
        told = "Not measured here: no two batches fitted"
    chart = figure(told, "batch", "canvas step / token (log scale)", log_x=True, log_y=True)
    for (value, line), colour in zip(lines.items(), LINES, strict=False):
        chart.add_trace(_line(list(line), list(line.values()), f"{label} {value}", colour))
    if reference:
        chart.add_trace(published(list(reference), list(reference.values()), "first lab, 97M"))
    chart.update_xaxes(tickvals=sorted({*batches, *(reference or {})}))
    return chart


def breakdown_bars(results: Results, components: Sequence[str], batches: Sequence[int]) -> go.Figure:
    """Where each step's time goes: stacked shares by component, one bar a way and batch."""
    bars = [(way, batch) for way in _WAYS for batch in batches]
    shares = {
        component: [results.find("share", way=way, batch=batch, component=component).median for way, batch in bars]
        for component in components
    }
    # Medians of shares do not quite add up to one.
    totals = [sum(shares[component][bar] for component in components) for bar in range(len(bars))]
    shares = {component: [s / t for s, t in zip(found, totals, strict=True)] for component, found in shares.items()}
    vocabulary = sum(shares[c][0] for c in ("LM head", "self-conditioning", "sampler"))
    chart = go.Figure(
        layout={
            "template": TEMPLATE,
            "title": {"text": f"{vocabulary:.0%} of a canvas step is work on the vocabulary"},
            "height": 460,
            "barmode": "stack",
        }
    )
    names = [f"{way}, batch {batch}" for way, batch in bars]
    for component, colour in zip(components, _COMPONENT_COLOURS, strict=True):
        values = [100 * share for share in shares[component]]
        chart.add_bar(x=names, y=values, name=component, marker_color=colour, hovertemplate="%{y:.1f} %")
    chart.update_yaxes(title_text="% of the step")
    return chart


def speedup_map(results: Results, study: str, batches: Sequence[int], **labels: object) -> go.Figure:
    """Heat map of the speedup, batch by steps; white lies at no gain, blue above, orange below."""
    measured = {b: m for b in batches if (m := _ratio(results, study=study, batch=b, **labels))}
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 48]
    gains = [[256 / (n * m.median) for n in steps] for m in measured.values()]
    paying = sum(gain > 1 for row in gains for gain in row)
    chart = figure(
        f"Block diffusion pays in {paying} of {sum(map(len, gains))} combinations of batch and steps",
        "denoising steps a canvas",
        "batch",
    )
    chart.add_heatmap(
        x=[str(n) for n in steps],
        y=[str(b) for b in measured],
        z=[[math.log2(gain) for gain in row] for row in gains],
        zmin=-5,
        zmax=5,
        colorscale=[[0, ORANGE], [0.5, "#FFFFFF"], [1, BLUE]],
        text=[[f"{gain:.2g}" for gain in row] for row in gains],
        texttemplate="%{text}",
        textfont={"color": "#000000"},
        showscale=False,
        hovertemplate="batch %{y}, %{x} steps: %{text} times<extra></extra>",
    )
    chart.update_xaxes(type="category")
    chart.update_yaxes(type="category")
    return chart


def experts_touched(results: Results, experts: Sequence[str], batches: Sequence[int]) -> go.Figure:
    """Share of the experts that a forward touches, counted (markers) and for even, independent choices (lines)."""
    token, canvas = (
        [results.find("experts_touched", way=way, experts=experts[-1], batch=b).median for b in batches]
        for way in ("token", "canvas")
    )
    total = results.find("experts_touched", way="canvas", experts=experts[-1], batch=batches[0]).labels["total"]
    chart = figure(
        f"With {experts[-1]} experts a token at batch {batches[0]} touches {token[0] / total:.0%} of them, "
        f"a canvas {canvas[0] / total:.0%}",
        "batch",
        "% of the experts of a layer",
        log_x=True,
    )
    for choice, colour in zip(experts, LINES, strict=False):
        for way, symbol, dash in (("canvas", "square", "solid"), ("token", "circle", "dot")):
            found = [results.find("experts_touched", way=way, experts=choice, batch=b) for b in batches]
            marker = {"color": colour, "symbol": symbol, "size": 10}
            share = [100 * m.median / m.labels["total"] for m in found]
            name = f"{way}, {choice}"
            chart.add_scatter(x=list(batches), y=share, mode="markers", marker=marker, name=name)
            line = {"color": colour, "dash": dash, "width": 1}
            even = [100 * m.labels["expected"] / m.labels["total"] for m in found]
            chart.add_scatter(x=list(batches), y=even, mode="lines", line=line, showlegend=False, hoverinfo="skip")
    chart.update_xaxes(tickvals=list(batches))
    chart.update_yaxes(rangemode="tozero")
    return chart


def _ratio(results: Results, **labels: object) -> Measurement | None:
    """The measured cost ratio with these labels; None where the cell was not measured."""
    try:
        return results.find("cost_ratio", **labels)
    except LabError:
        return None


def _others(results: Results) -> list[Results]:
    """The recorded runs of the same experiment."""
    return [run for run in everywhere(results.experiment) if run.started != results.started]


def _add_others(chart: go.Figure, results: Results, line_of: Callable[[Results], dict[float, Measurement]]) -> None:
    """Adds the recorded runs' lines: x to measurement, as `line_of` finds them in a run."""
    for run, colour in zip(_others(results), (PURPLE, SKY, ORANGE), strict=False):
        if line := line_of(run):
            chart.add_trace(_line(list(line), list(line.values()), f"{run.host}, recorded", colour))


def _line(x: Sequence[float], found: Sequence[Measurement], name: str, colour: str) -> go.Scatter:
    return spread(x, [m.q1 for m in found], [m.median for m in found], [m.q3 for m in found], name, colour)


def _bars(x: Sequence[str], found: Sequence[Measurement], name: str, colour: str) -> go.Bar:
    return go.Bar(
        x=list(x),
        y=[m.median for m in found],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [m.q3 - m.median for m in found],
            "arrayminus": [m.median - m.q1 for m in found],
        },
        name=name,
        marker_color=colour,
    )
