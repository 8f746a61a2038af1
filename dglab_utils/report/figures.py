"""One look for all figures, and the few shapes of figure that the experiments share.

A figure's title says what was found. Colours are Okabe and Ito's, which stay apart for every kind of colour vision and
on light and dark ground; text, grid and background are left to the page, which knows its theme.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8C8C8C",
)
HEIGHT = 400  # px

TEMPLATE = go.layout.Template(
    layout={
        "colorway": [BLUE, ORANGE, GREEN, RED, PURPLE, SKY],
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 14},
        "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 16}},
        "margin": {"l": 64, "r": 16, "b": 56},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"automargin": True, "title": {"standoff": 8}},
        "yaxis": {"automargin": True, "title": {"standoff": 8}},
        "hovermode": "closest",
    }
)


def figure(title: str, x: str, y: str, *, height: int = HEIGHT, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """An empty figure in the lab's look.

    Args:
        title: the finding, as a sentence.
        x, y: axis titles, with units.
        height: px; the width is the page's.
    """
    empty = go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": height})
    # 1, 2, 5: with every digit labelled, two decades overlap.
    logarithmic, linear = {"type": "log", "dtick": "D2"}, {"type": "linear"}
    empty.update_xaxes(title_text=x, **logarithmic if log_x else linear)
    empty.update_yaxes(title_text=y, **logarithmic if log_y else linear)
    return empty


def spread(
    x: Sequence[float],
    q1: Sequence[float],
    median: Sequence[float],
    q3: Sequence[float],
    name: str,
    colour: str,
    *,
    dash: str = "solid",
) -> go.Scatter:
    """Medians joined by a line, quartiles as whiskers."""
    return go.Scatter(
        x=list(x),
        y=list(median),
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - m for high, m in zip(q3, median, strict=True)],
            "arrayminus": [m - low for m, low in zip(median, q1, strict=True)],
            "thickness": 1.2,
            "width": 4,
        },
        mode="lines+markers",
        line={"color": colour, "dash": dash},
        name=name,
    )


def published(x: Sequence[float], y: Sequence[float], name: str) -> go.Scatter:
    """Published points to compare with: hollow diamonds, the same on every figure."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        mode="markers",
        marker={"symbol": "diamond-open", "size": 14, "color": RED, "line": {"width": 2}},
        name=name,
    )
