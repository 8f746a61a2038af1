"""Figures of engines side by side: notebooks 05 (diffusion against autoregression) and 06 (the pair on a CPU).

Each takes results that exist already and returns a plotly figure; nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from dglab_utils.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure, published
from dglab_utils.report.results import Results

_WAY_COLOURS = (GREY, SKY, GREEN, PURPLE, RED, BLUE, ORANGE)


def answer_times(results: Results, ways: Sequence[str], title: str) -> go.Figure:
    """Milliseconds of an answer, a bar a way: medians over prompts, quartiles as whiskers."""
    found = [results.find("answer", way=way, task="all") for way in ways]
    chart = figure(title, "ms an answer, median and quartiles (log scale)", "")
    chart.add_bar(
        y=[_wrapped(way) for way in ways],
        x=[m.median for m in found],
        orientation="h",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [m.q3 - m.median for m in found],
            "arrayminus": [m.median - m.q1 for m in found],
            "thickness": 1.2,
        },
        marker_color=[_WAY_COLOURS[i % len(_WAY_COLOURS)] for i in range(len(ways))],
        text=[f"{m.median:,.4g}" for m in found],
        textposition="inside",
        insidetextanchor="start",
        showlegend=False,
    )
    chart.update_yaxes(type="category", autorange="reversed")
    # Bars of a log axis have no natural foot: a decade below the shortest leaves room for its figure.
    low, high = min(m.median for m in found), max(m.q3 for m in found)
    chart.update_xaxes(type="log", range=[_log(low) - 0.7, _log(high) + 0.05], dtick=1)
    return chart.update_layout(height=110 + 46 * len(ways))


def processed_per_token(lines: Mapping[str, Mapping[float, float]], title: str) -> go.Figure:
    """Positions that went through the model for each token of an answer, against its length; a line a way."""
    chart = figure(title, "tokens of the answer", "positions computed a token (log scale)", log_x=True, log_y=True)
    for i, (way, line) in enumerate(lines.items()):
        chart.add_scatter(
            x=list(line),
            y=list(line.values()),
            mode="lines+markers",
            line={"color": _WAY_COLOURS[i % len(_WAY_COLOURS)]},
            name=way,
        )
    return chart


def price_by_size(
    sizes: Sequence[float], steps: Mapping[float, tuple[float, float, float]], even: Mapping[str, float], title: str
) -> go.Figure:
    """What a denoising step costs in tokens, against size.

    Args:
        sizes: millions of parameters that were tried.
        steps: size to (median, lower and upper end) of the price, where it was measured.
        even: name to the price at which both ways are equally fast, such as 16 tokens at 16 steps.
    """
    chart = figure(title, "parameters, millions", "denoising step / token (log scale)", log_x=True, log_y=True)
    chart.add_scatter(
        x=list(steps),
        y=[middle for middle, _, _ in steps.values()],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - middle for middle, _, high in steps.values()],
            "arrayminus": [middle - low for middle, low, _ in steps.values()],
            "thickness": 1.2,
        },
        mode="lines+markers",
        line={"color": BLUE},
        name="measured here",
    )
    for (name, price), dash in zip(even.items(), ("dot", "dash", "dashdot"), strict=False):
        ends = [min(sizes) / 1.5, max(sizes) * 1.5]
        chart.add_scatter(x=ends, y=[price] * 2, mode="lines", line={"color": GREY, "dash": dash}, name=name)
    chart.update_xaxes(tickvals=list(sizes), ticktext=[f"{size:.3g}" for size in sizes])
    return chart


def gain_by_balance(
    curve: Mapping[float, float],
    machines: Mapping[str, tuple[float, float]],
    reported: Mapping[str, tuple[float, float]],
    title: str,
) -> go.Figure:
    """Predicted speed of diffusion over autoregression against FLOPs a byte that a machine offers.

    Args:
        curve: balance to gain, nothing lost to overhead.
        machines: name to (balance, gain) by datasheet.
        reported: name to (balance, gain) that was published or measured.
    """
    chart = figure(title, "peak over bandwidth, FLOP a byte", "speed over autoregression", log_x=True, log_y=True)
    line = {"color": BLUE}
    chart.add_scatter(x=list(curve), y=list(curve.values()), mode="lines", line=line, name="predicted")
    ends = [min(curve), max(curve)]
    chart.add_scatter(x=ends, y=[1, 1], mode="lines", line={"color": GREY, "dash": "dot"}, name="equally fast")
    chart.add_scatter(
        x=[balance for balance, _ in machines.values()],
        y=[gain for _, gain in machines.values()],
        mode="markers",
        marker={"color": ORANGE, "size": 9},
        customdata=[[name] for name in machines],
        hovertemplate="%{customdata[0]}: %{x:.3g} FLOP a byte, %{y:.2f} times",
        name="datasheets",
    )
    points = published([b for b, _ in reported.values()], [g for _, g in reported.values()], "first lab's desktop")
    points.customdata = [[name] for name in reported]
    points.hovertemplate = "%{customdata[0]}: %{x:.3g} FLOP a byte, %{y:.2f} times"
    chart.add_trace(points)
    chart.update_xaxes(tickvals=[1, 3, 10, 30, 100, 300, 1000], dtick=None)
    chart.update_yaxes(tickvals=[0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], dtick=None)
    return chart


def _wrapped(name: str) -> str:
    """In two lines where it is long, so that a phone's figure keeps room for bars."""
    words, lines = name.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 18:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(lines)


def _log(value: float) -> float:
    return math.log10(value)
