"""Figures of the trained model: notebooks 08 (steps follow difficulty) and 09 (quality against steps).

Each takes measurements or traces that exist already and returns a plotly figure; nothing here measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dglab_utils.measure.records import Measurement
from dglab_utils.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, TEMPLATE, figure
from dglab_utils.report.results import Results

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, "#4D4D4D", "#F0E442", "#999933")
MODEL_COLOURS = {"nano": BLUE, "nano-young": ORANGE, "untrained": GREY}  # others take what is left of COLOURS
COLUMNS = 2  # of small charts: what a phone can show


def by_difficulty(
    results: Results, name: str, tasks: Mapping[str, tuple[Sequence[int], Sequence[int]]], y: str, title: str
) -> go.Figure:
    """One small chart a task: a measurement against difficulty, a line a model; hollow where it was never trained on.

    Args:
        name: of the measurement; its labels `interval`, where there are any, are the whiskers.
        tasks: task to (levels trained on, levels beyond).
        y: axis title.
    """
    grid = make_subplots(
        rows=-(-len(tasks) // COLUMNS),
        cols=COLUMNS,
        subplot_titles=list(tasks),
        vertical_spacing=0.09,
        shared_yaxes=True,
    )
    grid.update_layout(template=TEMPLATE, title={"text": title}, height=170 * -(-len(tasks) // COLUMNS) + 120)
    colours = _colours(m.labels["model"] for m in results.measurements if m.name == name and "task" in m.labels)
    for i, (task, (levels, beyond)) in enumerate(tasks.items()):
        for model, colour in colours.items():
            asked = {"task": task, "model": model}
            told = {
                m.labels["level"]: m
                for m in results.measurements
                if m.name == name and asked.items() <= m.labels.items() and m.labels["level"] in (*levels, *beyond)
            }
            if not told:
                continue
            grid.add_trace(
                go.Scatter(
                    x=list(told),
                    y=[_middle(m) for m in told.values()],
                    error_y=_whiskers(list(told.values())),
                    mode="lines+markers",
                    line={"color": colour},
                    marker={
                        "size": 8,
                        "symbol": ["circle-open" if level in beyond else "circle" for level in told],
                        "color": colour,
                    },
                    name=model,
                    legendgroup=model,
                    showlegend=i == 0,
                ),
                row=i // COLUMNS + 1,
                col=i % COLUMNS + 1,
            )
    grid.update_yaxes(rangemode="tozero")
    grid.update_yaxes(title_text=y, col=1)
    return grid


def _colours(models: Iterable[str]) -> dict[str, str]:
    """A colour a model, the same in every figure for those that the lab ships."""
    free = iter(colour for colour in COLOURS if colour not in MODEL_COLOURS.values())
    return {model: MODEL_COLOURS.get(model) or next(free, GREY) for model in dict.fromkeys(models)}


def _middle(m: Measurement) -> float:
    """The mean where the label has it, a median otherwise: a share of right answers has no useful median."""
    mean = m.labels.get("mean", m.median)
    assert isinstance(mean, (int, float))
    return float(mean)


def _whiskers(found: Sequence[Measurement]) -> dict[str, object]:
    ends = [m.labels.get("interval", [m.q1, m.q3]) for m in found]
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, high - _middle(m)) for (_, high), m in zip(ends, found, strict=True)],
        "arrayminus": [max(0.0, _middle(m) - low) for (low, _), m in zip(ends, found, strict=True)],
        "thickness": 1.2,
        "width": 3,
    }


def entropy_by_step(traces: Mapping[str, Sequence[np.ndarray]], title: str) -> go.Figure:
    """Mean entropy of the canvas against the step, a line a model: median of the runs that are still going."""
    chart = figure(title, "denoising step", "mean entropy of a position, nats")
    colours = _colours(traces)
    for name, runs in traces.items():
        colour = colours[name]
        steps = max(len(run) for run in runs)
        middle = [float(np.median([run[s] for run in runs if len(run) > s])) for s in range(steps)]
        chart.add_scatter(
            x=list(range(1, steps + 1)), y=middle, mode="lines+markers", line={"color": colour}, name=name
        )
    chart.update_yaxes(rangemode="tozero")
    return chart


def order_by_task(found: Mapping[str, Sequence[float]], title: str) -> go.Figure:
    """Kendall's tau-b between position and the step it was first accepted at, one box a task."""
    chart = figure(title, "order: 1 left to right, -1 right to left", "")
    for name, values in found.items():
        chart.add_box(x=list(values), name=name, marker_color=BLUE, boxpoints=False, showlegend=False)
    chart.update_yaxes(type="category")  # of the names; a linear axis would count the boxes
    chart.update_xaxes(range=[-1.05, 1.05], zeroline=True)
    chart.update_layout(height=90 + 44 * len(found))
    return chart


def _against_steps(title: str) -> go.Figure:
    """An empty figure of right answers over the steps of a canvas. Their decade and a half wants ticks of its own."""
    chart = figure(title, "denoising steps, mean", "right answers, %", log_x=True)
    return chart.update_xaxes(tickvals=[2, 3, 5, 10, 20, 30, 48])


def right_against_steps(
    results: Results, tasks: Sequence[str], bounds: Sequence[float], title: str, best: Sequence[float] = ()
) -> go.Figure:
    """Share of right answers against steps, a line a task, a point an entropy bound."""
    chart = _against_steps(title)
    for task, colour in zip(tasks, COLOURS, strict=False):
        right = [results.find("right", task=task, bound=b, study="bound") for b in bounds]
        steps = [results.find("steps", task=task, bound=b, study="bound") for b in bounds]
        chart.add_scatter(
            x=[_middle(m) for m in steps],
            y=[100 * _middle(m) for m in right],
            mode="lines+markers",
            line={"color": colour},
            marker={"size": [13 if b in best else 7 for b in bounds]},
            customdata=[[b] for b in bounds],
            hovertemplate="bound %{customdata[0]:g}: %{y:.1f} % in %{x:.1f} steps",
            name=task,
        )
    return chart


def lines(
    x: Sequence[float],
    by_name: Mapping[str, Sequence[float]],
    title: str,
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    dashes: Mapping[str, str] | None = None,
) -> go.Figure:
    """Plain lines over one axis."""
    chart = figure(title, x_title, y_title, log_x=log_x)
    for (name, values), colour in zip(by_name.items(), COLOURS, strict=False):
        dash = (dashes or {}).get(name, "solid")
        chart.add_scatter(
            x=list(x), y=list(values), mode="lines+markers", line={"color": colour, "dash": dash}, name=name
        )
    if log_x:
        chart.update_xaxes(tickvals=list(x))
    return chart


Point = tuple[float, float, tuple]  # steps, right answers in per cent, settings


def pareto(points: Mapping[str, Sequence[Point]], knobs: Sequence[str], official: tuple) -> go.Figure:
    """Right answers against steps for every setting of the knobs; those that no other beats in both are joined.

    Args:
        points: kind of task to its points.
        knobs: names of the settings, in their order.
        official: the official settings.
    """
    gains = []
    chart = _against_steps("")
    for (kind, told), colour in zip(points.items(), COLOURS, strict=False):
        front = [p for p in told if not any(_beats(other, p) for other in told)]
        front.sort(key=lambda point: point[0])
        for shown, mode, size in ((told, "markers", 7), (front, "lines", 0)):
            chart.add_scatter(
                x=[steps for steps, _, _ in shown],
                y=[right for _, right, _ in shown],
                mode=mode,
                marker={"color": colour, "size": size, "opacity": 0.6},
                line={"color": colour},
                customdata=[[", ".join(f"{k} {v:g}" for k, v in zip(knobs, s, strict=True))] for *_, s in shown],
                hovertemplate="%{customdata[0]}: %{y:.1f} % in %{x:.1f} steps",
                name=kind if mode == "markers" else f"{kind}, not beaten",
            )
        for steps, right, settings in told:
            if settings == official:
                marker = {"symbol": "diamond", "size": 14, "color": colour, "line": {"width": 2, "color": GREY}}
                chart.add_scatter(x=[steps], y=[right], mode="markers", marker=marker, name=f"{kind}, official")
                faster = [p for p in told if p[1] >= right]
                gains.append(f"{kind} {steps / min(p[0] for p in faster):.1f} times")
    title = "Steps saved by other settings without a loss: " + ", ".join(gains) if gains else "All settings"
    chart.update_layout(title={"text": title})
    return chart


def _beats(one: Point, other: Point) -> bool:
    """At least as good in both, better in one."""
    return one[0] <= other[0] and one[1] >= other[1] and one[:2] != other[:2]
