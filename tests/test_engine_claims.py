"""Verdicts and figures of notebooks 05 and 06 follow from results: met, met in part, missed, and not measured."""

from __future__ import annotations

import numpy as np
import pytest

from dglab_utils.report import engine_figures as figures
from dglab_utils.report.claims import claim
from dglab_utils.report.results import Results


def trio(loss: tuple[float, float], won: tuple[float, float] = (2.0, 3.0), prompts: int = 8) -> Results:
    """Intervals of how many times as fast as a token at a time: as published, and with cache and threshold."""
    made, peer = Results.begin("05_diffusion_vs_ar", {}), "the twin a token at a time"
    for after, (low, high) in {"masked, as published": loss, "masked, + threshold": won}.items():
        labels = {"before": peer, "after": after, "prompts": prompts, "interval": [low, high]}
        made.measure("gain", "", [(low + high) / 2], timed=True, **labels)
        made.measure("right", "", [1.0], way=after, task="all", mean=0.9)
    made.measure("right", "", [1.0], way=peer, task="all", mean=1.0)
    for way, ms in ((peer, 5.0), ("masked, as published", 10.0)):
        made.measure("filled", "ms", [ms], timed=True, way=way, task="all")
    return made


def lengths(*pairs: tuple[float, float]) -> Results:
    """(tokens, positions through the model for each), shortest first."""
    made = Results.begin("05_diffusion_vs_ar", {})
    made.verdict_inputs["processed_by_length"] = [{"tokens": t, "processed": c} for t, c in pairs]
    return made


def cpu(
    *intervals: tuple[float, float],
    pair: tuple[tuple[float, float], ...] = (),
    unit: str = "tokens",
    steps: int = 16,
    failed: str = "",
    millions: float = 50.0,
) -> Results:
    """Intervals of the gains of copies, smallest first; (diffusion, ar) rates of the pair by prompt."""
    made = Results.begin("06_cpu_26b", {})
    for i, (low, high) in enumerate(reversed(intervals)):  # in no order, as a sweep may be asked for
        labels = {"millions": millions / 2**i, "interval": [low, high]}
        made.measure("gain", "", [(low + high) / 2], timed=True, **labels)
    made.verdict_inputs |= {
        "pair": [{"category": str(i), "unit": unit, "diffusion": d, "ar": a} for i, (d, a) in enumerate(pair)],
        "predicted_gain": 0.3,
        "steps": steps,
        "pair_failed": failed,
    }
    return made


SLOWER = ((0.8, 4.2), (1.2, 4.6))


@pytest.mark.parametrize(
    ("id", "results", "state", "said"),
    [
        ("uncached-fixed-steps-lose", trio((0.1, 0.2)), "reproduced", "the same weights take less time"),
        (
            "uncached-fixed-steps-lose",
            trio((0.1, 0.2)),
            "reproduced",
            "right answers 100%, 90%, 90%; a filled position, behind the end or not, 2.0 times",
        ),
        ("uncached-fixed-steps-lose", trio((0.1, 0.2), (0.9, 1.5)), "reproduced", "do not clearly make up for it"),
        ("uncached-fixed-steps-lose", trio((0.5, 1.1)), "partly", "the interval of the median holds 1"),
        ("uncached-fixed-steps-lose", trio((1.1, 1.4)), "not reproduced", "no slower than its peer"),
        ("uncached-fixed-steps-lose", trio((0.1, 0.2), prompts=7), "not measured here", "timed 7 prompts"),
        ("short-answers-pay-a-canvas", lengths((4, 32), (25, 20.0)), "reproduced", "32.0 positions"),
        ("short-answers-pay-a-canvas", lengths((4, 20), (40, 20)), "not reproduced", "as much fewer steps"),
        ("short-answers-pay-a-canvas", lengths((20, 3.2), (39, 1.0)), "not measured here", "nearly one length"),
        ("short-answers-pay-a-canvas", lengths((20, 3.2)), "not measured here", "nearly one length"),
        (
            "cpu-inverts",
            cpu((1.5, 2.5), (0.1, 0.3)),
            "partly",
            "2.00 times the speed at 25M, 0.20 times the speed at 50M",
        ),
        ("cpu-inverts", cpu((2.0, 3.0), (1.1, 1.2)), "not reproduced", "still faster by diffusion"),
        ("cpu-inverts", cpu((0.9, 1.1)), "not measured here", "both ways are equally fast"),
        ("cpu-inverts", cpu((1.1, 1.2), millions=20.0), "not measured here", "no copy of 50 million"),
        ("cpu-inverts", cpu((0.1, 0.3), steps=48), "not measured here", "supposed 48 steps a canvas; 11 to 19"),
        ("cpu-inverts", cpu(), "not measured here", "no copy of 50 million"),
        ("cpu-inverts", cpu((0.1, 0.3), failed="x: no program there"), "not measured here", "x: no program there"),
        ("cpu-inverts", cpu((2.0, 2.1), pair=SLOWER), "reproduced", "0: 0.8 against 4.2 tokens/s"),
        ("cpu-inverts", cpu(pair=SLOWER, unit="positions"), "reproduced", "1: 1.2 against 4.6 positions/s"),
        ("cpu-inverts", cpu(pair=((5.0, 4.2), (1.2, 4.6))), "partly", "not slower everywhere"),
        ("cpu-inverts", cpu(pair=((5.0, 4.2),)), "not reproduced", "not slower everywhere"),
        ("cpu-inverts", cpu(pair=((5.0, 4.2),), unit="positions"), "not measured here", "give its tokenizer"),
    ],
)
def test_verdicts(id, results, state, said):
    verdict = claim(id).verdict(results)
    assert verdict.state == state
    assert said in f"{verdict.measured} {verdict.because}"


def test_bars_stand_at_their_medians_with_quartiles():
    made = Results.begin("05_diffusion_vs_ar", {})
    made.measure("answer", "ms", [10.0, 20.0, 40.0], timed=True, way="a way with a rather long name", task="all")
    made.measure("answer", "ms", [100.0], timed=True, way="b", task="all")
    chart = figures.answer_times(made, ["a way with a rather long name", "b"], "found")
    (bars,) = chart.data
    assert list(bars.x) == [20.0, 100.0] and list(bars.error_x.array) == [10.0, 0.0]
    assert list(bars.error_x.arrayminus) == [5.0, 0.0]
    assert bars.y[0] == "a way with a rather<br>long name" and bars.y[1] == "b"
    low, high = chart.layout.xaxis.range
    assert 10**low < 20 and 10**high > 100


def test_lines_and_points_of_the_other_figures():
    chart = figures.processed_per_token({"a": {2: 32.0, 20: 3.2}, "b": {2: 1.0, 20: 1.0}}, "found")
    assert [list(line.y) for line in chart.data] == [[32.0, 3.2], [1.0, 1.0]] and list(chart.data[0].x) == [2, 20]
    chart = figures.price_by_size(
        [1.0, 25.0, 96.0], {1.0: (6.0, 5.0, 8.0)}, {"equally fast at 16 steps": 16.0}, "found"
    )
    measured, even = chart.data
    assert (
        list(measured.y) == [6.0]
        and list(measured.error_y.array) == [2.0]
        and list(measured.error_y.arrayminus) == [1.0]
    )
    assert list(even.y) == [16.0, 16.0] and min(even.x) < 1 < 96 < max(even.x)
    curve = dict(zip(np.geomspace(1, 1000, 4).tolist(), [0.1, 0.5, 2.0, 5.0], strict=True))
    chart = figures.gain_by_balance(curve, {"card": (300.0, 3.0)}, {"math": (12.0, 0.3)}, "found")
    assert [trace.name for trace in chart.data] == ["predicted", "equally fast", "datasheets", "first lab's desktop"]
    assert list(chart.data[2].y) == [3.0] and list(chart.data[3].x) == [12.0]
