"""Verdicts and figures of notebooks 05 and 06 follow from results: met, met in part, missed, and not measured."""

from __future__ import annotations

import numpy as np
import pytest

from dglab_utils.report import engine_figures as figures
from dglab_utils.report.claims import claim
from dglab_utils.report.results import Results


def trio(peer: float, naive: float, best: float, prompts: int = 8) -> Results:
    """Milliseconds of an answer a token at a time, masked as published, and with all that later engines added."""
    made = Results.begin("05_diffusion_vs_ar", {})
    told = {"autoregressive": peer, "masked, as published": naive, "masked, all three": best}
    made.verdict_inputs["ways"] = {way: {"ms": ms, "prompts": prompts} for way, ms in told.items()}
    return made


def lengths(*pairs: tuple[float, float]) -> Results:
    """(tokens, positions computed a token), shortest first."""
    made = Results.begin("05_diffusion_vs_ar", {})
    made.verdict_inputs["computed_by_length"] = [{"tokens": t, "computed": c} for t, c in pairs]
    return made


def cpu(gains: tuple[float, ...] = (), pair: tuple[tuple[float, float], ...] = ()) -> Results:
    """Gains of copies, smallest first; (diffusion, ar) tokens/s of the pair by prompt."""
    made = Results.begin("06_cpu_26b", {})
    made.verdict_inputs |= {
        "copies": [{"millions": 25.0 * (i + 1), "gain": gain} for i, gain in enumerate(gains)],
        "pair": [{"category": str(i), "diffusion": d, "ar": a} for i, (d, a) in enumerate(pair)],
        "predicted_gain": 0.3,
        "steps": 16,
    }
    return made


@pytest.mark.parametrize(
    ("id", "results", "state", "said"),
    [
        ("uncached-fixed-steps-lose", trio(100, 700, 50), "reproduced", "7.0 times"),
        ("uncached-fixed-steps-lose", trio(100, 700, 150), "reproduced", "does not make up for it"),
        ("uncached-fixed-steps-lose", trio(100, 90, 50), "not reproduced", "no slower than its peer"),
        ("uncached-fixed-steps-lose", trio(100, 700, 50, prompts=7), "not measured here", "timed 7 prompts"),
        ("short-answers-pay-a-canvas", lengths((2, 64), (40, 3.2)), "reproduced", "64.0 positions"),
        ("short-answers-pay-a-canvas", lengths((20, 3.0), (40, 2.5)), "not reproduced", "hardly more"),
        ("short-answers-pay-a-canvas", lengths((20, 3.2), (39, 1.0)), "not measured here", "nearly one length"),
        ("short-answers-pay-a-canvas", lengths((20, 3.2)), "not measured here", "one length only"),
        ("cpu-inverts", cpu((2.0, 0.2)), "partly", "2.00 times the speed at 25M, 0.20 times at 50M"),
        ("cpu-inverts", cpu((2.0, 1.1)), "not reproduced", "still faster by diffusion"),
        ("cpu-inverts", cpu(), "not measured here", "no scaled copy"),
        ("cpu-inverts", cpu((2.0,), ((0.8, 4.2), (1.2, 4.6))), "reproduced", "0: 0.8 against 4.2 tokens/s"),
        ("cpu-inverts", cpu((), ((5.0, 4.2), (1.2, 4.6))), "partly", "not slower everywhere"),
        ("cpu-inverts", cpu((), ((5.0, 4.2),)), "not reproduced", "not slower everywhere"),
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
    chart = figures.computed_per_token({"a": {2: 32.0, 20: 3.2}, "b": {2: 1.0, 20: 1.0}}, "found")
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
