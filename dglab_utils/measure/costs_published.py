"""The cost model against published speeds: fitted to two of them, asked for all others.

    rows = published_rows(reference("engines"))
    efficiency = calibrate(rows, shape, cards, assumed_peak=0.5)
    for row in against_published(rows, shape, cards, efficiency): ...

Two H100 rows fix two numbers, the fraction of bandwidth and the overhead of a layer, and leave no freedom: that they
are met proves nothing, the other rows do. At batch 1 weights bound both modes, so no row tells the fraction of the
peak; it is assumed, and `sensitivity` says how much hangs on it.

Knows the fields of data/reference/engines.yaml; reads no file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dglab_utils.errors import LabError
from dglab_utils.measure.costs import Efficiency, Hardware, ModelShape
from dglab_utils.measure.costs_fit import fit
from dglab_utils.measure.costs_serving import (
    Drafts,
    Load,
    Setup,
    autoregressive,
    serve_autoregressive,
    serve_diffusion,
    setup_of,
)

METRICS = ("rate", "decode_rate", "step_ms", "request_s", "speedup")
USES = ("calibrate", "predict", "silent")
START = Efficiency(bandwidth=0.6, peak=0.5, overhead=1e-4)


@dataclass(frozen=True)
class Published:
    """One published figure. A pair is the range of what was published, or of what was not.

    Attributes:
        what, source, assumed, why: words for the reader.
        use: one of `USES`. The fields below are empty where it is "silent".
        mode: "diffusion", "ar", or "mtp", autoregressive with drafts.
        metric: one of `METRICS`. value: its published ends, equal where one figure was published.
    """

    id: str
    what: str
    source: str
    use: str
    why: str = ""
    assumed: str = ""
    hardware: str = ""
    precision: str = ""
    mode: str = ""
    metric: str = ""
    batch: int = 1
    prompt: int = 1
    output: int = 1
    steps: tuple[float, float] = (1, 1)
    drafts: int = 0
    acceptance: tuple[float, float] = (0, 0)
    value: tuple[float, float] = (0, 0)


@dataclass(frozen=True)
class Row:
    """A published figure beside the model's. `predicted`: lowest and highest; None where the model is silent.

    `error` is predicted over published minus one, between the geometric means of both ranges.
    """

    published: Published
    predicted: tuple[float, float] | None
    error: float | None


def published_rows(content: Mapping[str, Any]) -> tuple[Published, ...]:
    """The rows of data/reference/engines.yaml.

    Raises:
        LabError: a row with an unknown key, use or metric, or with one missing.
    """
    return tuple(_published(entry) for entry in content["rows"])


def calibrate(
    rows: Sequence[Published], shape: ModelShape, cards: Mapping[str, Hardware], *, assumed_peak: float
) -> Efficiency:
    """Fraction of bandwidth and overhead of a layer that meet the rows marked "calibrate"."""
    chosen = [row for row in rows if row.use == "calibrate"]
    return fit(
        [lambda efficiency, row=row: _middle(_predict(row, shape, cards, efficiency)) for row in chosen],  # type: ignore[misc]
        [_middle(row.value) for row in chosen],
        start=replace(START, peak=assumed_peak),
        free=("bandwidth", "overhead"),
    )


def against_published(
    rows: Iterable[Published], shape: ModelShape, cards: Mapping[str, Hardware], efficiency: Efficiency
) -> tuple[Row, ...]:
    """Every row with what the model says of it."""
    table = []
    for row in rows:
        if row.use == "silent":
            table.append(Row(row, None, None))
            continue
        predicted = _predict(row, shape, cards, efficiency)
        table.append(Row(row, predicted, _middle(predicted) / _middle(row.value) - 1))
    return tuple(table)


def sensitivity(
    rows: Sequence[Published], shape: ModelShape, cards: Mapping[str, Hardware], peaks: Sequence[float]
) -> dict[str, list[float]]:
    """Errors of the predicted rows by id, one for each assumed fraction of the peak, calibrated anew each time."""
    errors: dict[str, list[float]] = {row.id: [] for row in rows if row.use == "predict"}
    for peak in peaks:
        efficiency = calibrate(rows, shape, cards, assumed_peak=peak)
        for row in against_published(rows, shape, cards, efficiency):
            if row.published.use == "predict" and row.error is not None:
                errors[row.published.id].append(row.error)
    return errors


def implied_steps(first_s: float, prefill_s: float, step_s: float) -> float:
    """Denoising steps that fit between the prompt and the first canvas."""
    return (first_s - prefill_s) / step_s


def _published(entry: Mapping[str, Any]) -> Published:
    entry = dict(entry)
    name = entry.get("id", "without id")
    use, metric = entry.get("use"), entry.get("metric")
    if use not in USES or (use != "silent" and metric not in METRICS):
        raise LabError(
            f"published row {name}: use {use!r}, metric {metric!r}; want {'|'.join(USES)}, {'|'.join(METRICS)}"
        )
    if use != "silent":
        entry["value"] = _pair(entry.pop("published", None), name)
    for key in ("steps", "acceptance"):
        if key in entry:
            entry[key] = _pair(entry[key], name)
    try:
        return Published(**entry)
    except TypeError as error:
        raise LabError(f"published row {name}: {error}") from None


def _pair(value: Any, name: str) -> tuple[float, float]:
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2 or not all(isinstance(end, int | float) for end in ends):
        raise LabError(f"published row {name}: {value!r} is neither a number nor a pair of them")
    return float(ends[0]), float(ends[1])


def _predict(
    row: Published, shape: ModelShape, cards: Mapping[str, Hardware], efficiency: Efficiency
) -> tuple[float, float]:
    """Lowest and highest prediction over the ends of what was not published."""
    if row.hardware not in cards:
        raise LabError(f"published row {row.id}: no hardware {row.hardware!r}; there are {', '.join(cards)}")
    setup = setup_of(cards[row.hardware], row.precision, efficiency)
    values = [
        _figure(row, Load(row.batch, row.prompt, row.output, steps), acceptance, shape, setup)
        for steps, acceptance in itertools.product(sorted(set(row.steps)), sorted(set(row.acceptance)))
    ]
    return min(values), max(values)


def _figure(row: Published, load: Load, acceptance: float, shape: ModelShape, setup: Setup) -> float:
    if row.mode == "diffusion":
        served = serve_diffusion(shape, load, setup)
    else:
        drafts = Drafts(row.drafts, acceptance) if row.mode == "mtp" else None
        served = serve_autoregressive(autoregressive(shape), load, setup, drafts)
    if row.metric == "rate":
        return served.rate
    if row.metric == "decode_rate":
        return load.batch * (load.output - 1) / (served.total - served.first)
    if row.metric == "step_ms":
        return 1e3 * served.step.total
    if row.metric == "request_s":
        return served.total
    return served.rate / serve_autoregressive(autoregressive(shape), load, setup).rate


def _middle(ends: tuple[float, float]) -> float:
    return math.sqrt(ends[0] * ends[1])
