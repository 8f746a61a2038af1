"""Figures of the sampler's dynamics: notebooks 01 (an untrained model) and 02 (commit waves).

Each takes traces or measurements that exist already and returns a plotly figure; nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dglab_utils.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, TEMPLATE, figure, published, spread
from dglab_utils.report.results import Results
from dglab_utils.sampling.trace import CanvasTrace


def entropy_and_accepted(traces: Sequence[CanvasTrace], title: str) -> go.Figure:
    """Mean entropy (band: all runs) above accepted positions a step, against the step. One model, several seeds."""
    steps = min(t.steps for t in traces)
    entropy = np.stack([t.mean_entropy[:steps] for t in traces])  # [runs, S]
    accepted = np.stack([t.commits_per_step[:steps] for t in traces])
    at = list(range(1, steps + 1))
    both = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    both.update_layout(template=TEMPLATE, title={"text": title}, height=460)
    for y, fill in ((entropy.min(axis=0), None), (entropy.max(axis=0), "tonexty")):
        line = {"color": BLUE, "width": 0.5}
        both.add_scatter(x=at, y=y.tolist(), mode="lines", line=line, fill=fill, showlegend=False, row=1, col=1)
    median = np.median(entropy, axis=0).tolist()
    both.add_scatter(x=at, y=median, mode="lines", line={"color": BLUE}, name="mean entropy, all runs", row=1, col=1)
    uniform = math.log(traces[0].settings["vocab_size"])
    both.add_scatter(
        x=[1, steps],
        y=[uniform, uniform],
        mode="lines",
        line={"color": RED, "dash": "dash"},
        name="ln(vocabulary): no knowledge at all",
        row=1,
        col=1,
    )
    both.add_bar(
        x=at, y=accepted.mean(axis=0).tolist(), marker_color=ORANGE, name="accepted, mean of runs", row=2, col=1
    )
    threshold = traces[0].settings["confidence_threshold"]
    both.add_scatter(
        x=[1, steps],
        y=[threshold, threshold],
        mode="lines",
        line={"color": GREEN, "dash": "dot"},
        name="what the stop test wants",
        row=1,
        col=1,
    )
    both.update_yaxes(title_text="nats", rangemode="tozero", row=1, col=1)
    both.update_yaxes(title_text="positions", rangemode="tozero", row=2, col=1)
    both.update_xaxes(title_text="denoising step", row=2, col=1)
    return both


def tokens_per_forward_by_output(
    lengths: Sequence[int], values: Sequence[float], accepted: float, steps: int, canvas: int, reference: float
) -> go.Figure:
    """The official tokens per forward of each run against its output length, and the line length / steps.

    Args:
        lengths, values: tokens returned and tokens a forward, one a run.
        accepted: positions accepted a step, median of the runs.
        steps: decoder forwards, the same in every run.
        canvas: the longest output.
        reference: the published tokens a forward.
    """
    chart = figure(
        f"The official figure is output length over {steps} steps, wherever an EOS happened to fall",
        "tokens returned before padding, the EOS included",
        "tokens a forward",
    )
    chart.add_scatter(
        x=[0, canvas],
        y=[0, canvas / steps],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
        name=f"length / {steps}",
    )
    chart.add_scatter(
        x=[0, canvas], y=[accepted] * 2, mode="lines", line={"color": ORANGE}, name="accepted a step, median"
    )
    chart.add_scatter(
        x=list(lengths),
        y=list(values),
        mode="markers",
        marker={"color": BLUE, "size": 10, "opacity": 0.75},
        name="one seed",
    )
    chart.add_trace(published([reference * steps], [reference], "first lab"))
    return chart


def accepted_by_sharpness(results: Results, sharpness: Sequence[float]) -> go.Figure:
    """Accepted a step, steps taken and the share of changing guesses, against the sharpness of an untrained model."""
    accepted = [results.find("accepted_per_step", sharpness=f) for f in sharpness]
    steps = [results.find("steps", sharpness=f) for f in sharpness]
    changed = [results.find("argmax_changed", sharpness=f) for f in sharpness]
    best = max(m.median for m in accepted)
    saved = "and still no canvas stops early" if min(m.median for m in steps) == max(m.q3 for m in steps) else ""
    chart = figure(
        f"Sharpened, random weights accept up to {best:.0f} positions a step {saved}".rstrip(),
        "factor on the gain of the last norm",
        "positions, steps, or per cent",
        log_x=True,
    )
    for found, name, colour, scale in (
        (accepted, "accepted a step", BLUE, 1),
        (steps, "steps taken", ORANGE, 1),
        (changed, "guesses that change a step, %", PURPLE, 100),
    ):
        q1, median, q3 = ([scale * getattr(m, q) for m in found] for q in ("q1", "median", "q3"))
        chart.add_trace(spread(sharpness, q1, median, q3, name, colour))
    chart.update_xaxes(tickvals=list(sharpness))
    chart.update_yaxes(rangemode="tozero")
    return chart


def commit_waves(trace: CanvasTrace, difficulty: np.ndarray, title: str) -> go.Figure:
    """Which positions each step accepted; positions from the easiest to the hardest."""
    order = np.argsort(difficulty, kind="stable")
    before = np.vstack([np.zeros_like(trace.accepted[:1]), trace.accepted[:-1]])
    state = trace.accepted.astype(int) + (trace.accepted & ~before)  # 0 not accepted, 1 again, 2 newly
    chart = figure(title, "denoising step", "position, from the easiest to the hardest", height=440)
    steps = ["rgba(128, 128, 128, 0.2)", SKY, BLUE]
    scale = [[edge, colour] for i, colour in enumerate(steps) for edge in (i / 3, (i + 1) / 3)]
    chart.add_heatmap(
        z=state[:, order].T.tolist(),
        x=list(range(1, trace.steps + 1)),
        zmin=-0.5,
        zmax=2.5,
        colorscale=scale,
        colorbar={
            "tickvals": [0, 1, 2],
            "ticktext": ["not accepted", "again", "newly"],
            "orientation": "h",
            "y": 1.0,
            "yanchor": "bottom",
            "thickness": 12,
        },
        hovertemplate="step %{x}, rank %{y}<extra></extra>",
    )
    return chart


def steps_and_accepted_by_bound(results: Results, bounds: Sequence[float], reference: Mapping) -> go.Figure:
    """On the first lab's ramp: accepted a step and steps, both against the bound, with the published values."""
    steps = [results.find("steps", study="first_lab", bound=b).median for b in bounds]
    accepted = [results.find("accepted_per_step", study="first_lab", bound=b).median for b in bounds]
    flat = len(set(steps)) == 1
    title = f"{bounds[-1] / bounds[0]:g} times the bound: {accepted[0]:.0f} become {accepted[-1]:.0f} accepted a step, "
    title += "and no step is saved" if flat else f"and {steps[0]:g} become {steps[-1]:g} steps"
    chart = figure(title, "entropy bound, nats", "positions a step, or steps", log_x=True)
    for values, key, name, colour in (
        (accepted, "bound_to_mean_accepted", "accepted a step, mean", BLUE),
        (steps, "bound_to_steps", "steps until the stop", ORANGE),
    ):
        chart.add_scatter(x=list(bounds), y=values, mode="lines+markers", line={"color": colour}, name=name)
        named = "first lab" if key == "bound_to_steps" else "first lab, accepted"
        marks = published(list(reference[key]), list(reference[key].values()), named)
        chart.add_trace(marks.update(showlegend=key == "bound_to_steps"))
    chart.update_xaxes(tickvals=list(bounds))
    chart.update_yaxes(rangemode="tozero")
    return chart


def steps_by_growth(results: Results, growths: Sequence[float], reference: Mapping) -> go.Figure:
    """Steps until the stop against growth, with the published values."""
    steps = [results.find("steps", study="first_lab", growth=g).median for g in growths]
    chart = figure(
        f"{growths[-1] / growths[0]:g} times the growth of confidence: {steps[0]:g} steps become {steps[-1]:g}",
        "growth of the target's logit a step",
        "steps until the stop",
        log_x=True,
    )
    chart.add_scatter(x=list(growths), y=steps, mode="lines+markers", line={"color": BLUE}, name="measured here")
    marks = reference["growth_to_steps"]
    chart.add_trace(published(list(marks), list(marks.values()), "first lab"))
    chart.update_xaxes(tickvals=list(growths))
    chart.update_yaxes(rangemode="tozero")
    return chart


def steps_by_bound_and_pull(results: Results, bounds: Sequence[float], pulls: Sequence[float]) -> go.Figure:
    """Steps until the stop against the bound, one line a pull; median and quartiles over ramps and draws."""
    strongest = [results.find("steps", study="coupled", pull=pulls[-1], bound=b).median for b in bounds]
    chart = figure(
        f"With pull {pulls[-1]:g}, from the tightest bound to the loosest, {strongest[0]:g} steps become "
        f"{strongest[-1]:g}",
        "entropy bound, nats",
        "steps until the stop",
        log_x=True,
    )
    for pull, colour in zip(pulls, (GREY, SKY, BLUE, PURPLE, GREEN, ORANGE), strict=False):
        found = [results.find("steps", study="coupled", pull=pull, bound=b) for b in bounds]
        name = "no pull: the canvas is ignored" if pull == 0 else f"pull {pull:g}"
        chart.add_trace(
            spread(bounds, [m.q1 for m in found], [m.median for m in found], [m.q3 for m in found], name, colour)
        )
    chart.update_xaxes(tickvals=list(bounds))
    chart.update_yaxes(rangemode="tozero")
    return chart


def entropy_at_acceptance(by_bound: Mapping[float, np.ndarray], low: float, high: float) -> go.Figure:
    """Distribution of the entropy at first acceptance, one box a bound; the published range of means as a band."""
    medians = [float(np.median(v)) for v in by_bound.values()]
    chart = figure(
        f"A looser bound accepts less certain positions: the median goes from {medians[0]:.2g} to "
        f"{medians[-1]:.2g} nats",
        "entropy bound, nats",
        "entropy at first acceptance, nats",
        log_y=True,
    )
    for bound, values in by_bound.items():
        q = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
        chart.add_trace(
            go.Box(
                x=[f"{bound:g}"],
                lowerfence=[q[0]],
                q1=[q[1]],
                median=[q[2]],
                q3=[q[3]],
                upperfence=[q[4]],
                marker_color=BLUE,
                showlegend=False,
            )
        )
    chart.add_hrect(y0=low, y1=high, fillcolor=RED, opacity=0.25, line_width=0)
    # A rectangle has no entry in the legend.
    square = {"symbol": "square", "color": RED, "opacity": 0.4, "size": 12}
    chart.add_scatter(x=[None], y=[None], mode="markers", marker=square, name="released model (published range)")
    chart.update_xaxes(type="category")
    chart.update_yaxes(exponentformat="power", dtick=1)
    return chart
