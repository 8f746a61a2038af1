"""Figures of batch reproducibility (notebook 07): how a difference grows and spreads, and what undoing it costs.

Each takes figures that exist already; nothing here measures. Modules are told apart by their names alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dglab_utils.report.figures import BLUE, GREY, ORANGE, TEMPLATE, figure
from dglab_utils.report.nano_figures import COLOURS

_LAYER = re.compile(r"(.*?)\.?layers\.(\d+)\.?(.*)")


def growth(by_run: Mapping[str, Sequence[Sequence[float]]], title: str) -> go.Figure:
    """Share of positions whose logits differ, against the step: median over comparisons, and where the middle half is.

    Args:
        by_run: name to the shares of each comparison, a step each.
    """
    chart = figure(title, "denoising step", "positions whose logits differ, %")
    for (name, shares), colour in zip(by_run.items(), COLOURS, strict=False):
        steps = range(max(map(len, shares)))
        # A canvas that has stopped differs no further: it is left out, not counted as equal.
        there = [[100 * share[s] for share in shares if len(share) > s] for s in steps]
        low, middle, high = (np.array([np.quantile(values, q) for values in there]) for q in (0.25, 0.5, 0.75))
        x = [s + 1 for s in steps]
        chart.add_scatter(
            x=x,
            y=middle,
            mode="lines+markers",
            line={"color": colour},
            name=name,
            error_y={
                "type": "data",
                "symmetric": False,
                "array": high - middle,
                "arrayminus": middle - low,
                "thickness": 1.2,
                "width": 3,
            },
        )
    chart.update_yaxes(range=[-3, 103])
    return chart


def divergence_map(shares: Mapping[str, float], title: str) -> go.Figure:
    """What differs where: parts of a layer down, layers across, for each stack of layers one map.

    Args:
        shares: module to the share of its values that differ, in the order of execution.
    """
    stacks: dict[str, dict[str, dict[str, float]]] = {}
    alone: dict[str, float] = {}
    for module, share in shares.items():
        if found := _LAYER.fullmatch(module):
            stack, layer, part = found.groups()
            stacks.setdefault(stack, {}).setdefault(part or "the layer's own sums", {})[layer] = share
        else:
            alone[module] = share
    rows = [len(parts) for parts in stacks.values()] + ([len(alone)] if alone else [])
    names = [*stacks, *(["outside of layers"] if alone else [])]
    between = 52  # px, for the layers' numbers and the next title
    inside = 24 * sum(rows) + between * (len(rows) - 1)
    grid = make_subplots(
        rows=len(rows),
        cols=1,
        row_heights=rows,
        subplot_titles=[f"{name.removeprefix('model.')}, by layer" for name in stacks] + names[len(stacks) :],
        vertical_spacing=between / inside,
    )
    grid.update_layout(template=TEMPLATE, title={"text": title}, height=inside + 220)
    grid.update_annotations(x=1, xanchor="right")  # over the labels too, where a phone leaves the map little width
    for i, parts in enumerate([*stacks.values(), *([_column(alone)] if alone else [])]):
        layers = list(dict.fromkeys(layer for cells in parts.values() for layer in cells))
        values = [[100 * cells[c] if c in cells else None for c in layers] for cells in parts.values()]
        grid.add_heatmap(
            z=values,
            x=layers,
            y=list(parts),
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            hovertemplate="%{y}, layer %{x}: %{z:.2f} % differ<extra></extra>",
            row=i + 1,
            col=1,
        )
    grid.update_yaxes(autorange="reversed", tickfont={"size": 11})
    grid.update_xaxes(type="category")
    grid.update_layout(
        coloraxis={
            "cmin": 0,
            "cmax": 100,
            "colorscale": [[0, "rgba(140,140,140,0.18)"], [1e-6, "#56B4E9"], [0.5, BLUE], [1, "#00223A"]],
            "colorbar": {  # below, so that the maps have a phone's whole width
                "title": {"text": "% differ", "side": "top"},
                "orientation": "h",
                "y": 0,
                "yanchor": "top",
                "ypad": 46,
                "len": 1,
                "thickness": 10,
            },
        }
    )
    return grid


def _column(alone: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {module.removeprefix("model."): {"": share} for module, share in alone.items()}


def cost_by_batch(times: Mapping[int, Mapping[str, np.ndarray]], plain: str, title: str) -> go.Figure:
    """Time over that of the plain batch, against the rows, a line a way.

    Args:
        times: rows to way to seconds, `[rounds]`, made in turns, so that ratios are taken pair by pair.
        plain: name of the way that the others are divided by.
    """
    chart = figure(title, "rows of the batch", "time over that of the plain batch", log_x=True)
    ways = [way for way in next(iter(times.values())) if way != plain]
    for way, colour in zip(ways, (ORANGE, BLUE, *COLOURS[2:]), strict=False):
        ratios = {rows: of[way] / of[plain] for rows, of in times.items() if way in of}
        low, middle, high = (np.array([np.quantile(r, q) for r in ratios.values()]) for q in (0.25, 0.5, 0.75))
        chart.add_scatter(
            x=list(ratios),
            y=middle,
            mode="lines+markers",
            line={"color": colour},
            name=way,
            error_y={"type": "data", "symmetric": False, "array": high - middle, "arrayminus": middle - low},
        )
    chart.add_hline(y=1, line={"color": GREY, "dash": "dot"})
    chart.update_yaxes(rangemode="tozero")
    chart.update_xaxes(tickvals=list(times), ticktext=[str(rows) for rows in times])
    return chart
