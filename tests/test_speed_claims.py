"""Verdicts and figures of notebooks 03 and 04 follow from results: met, met in part, missed, and not measured."""

from __future__ import annotations

import pytest

from dglab_utils.measure.breakdown import COMPONENTS
from dglab_utils.report import speed_figures as figures
from dglab_utils.report.claims import claim
from dglab_utils.report.reference import reference
from dglab_utils.report.results import Results

LAB = reference("first_lab")


@pytest.fixture(autouse=True)
def no_recorded_runs(monkeypatch):
    monkeypatch.setattr("dglab_utils.report.speed_figures.everywhere", lambda experiment: [])


def one_size(theirs: float, full: float, shape: str = "toy-69m") -> Results:
    made = Results.begin("03_speed_model", {})
    for way, ratio in (("first lab's", theirs), ("step over step", full)):
        made.measure("cost_ratio", "", [ratio] * 3, timed=True, way=way, shape=shape, dtype="float32")
    for work, ms in (("canvas", 10 * full), ("token", 10.0)):
        for scope in ("body", "forward", "step"):
            made.measure("cost", "ms", [ms], timed=True, work=f"{work} {scope}", shape=shape)
        made.measure("floor", "ms", [2.0], timed=True, work=f"{work} step")
    made.measure("cost", "ms", [5.0], timed=True, work="append", shape=shape)
    return made


def sweep(sizes: dict, batches: dict, shape: str = "toy-97m") -> Results:
    made = Results.begin("04_size_and_batch", {})
    for name, ratio in sizes.items():
        made.measure("cost_ratio", "", [ratio], timed=True, study="size", shape=name, batch=1)
    for rows, ratio in batches.items():
        made.measure("cost_ratio", "", [ratio], timed=True, study="batch", shape=shape, batch=rows)
    return made


SIZES, BATCHES = (LAB["D_size_and_batch"][key] for key in ("size_to_ratio", "batch_to_ratio"))


@pytest.mark.parametrize(
    ("id", "results", "state"),
    [
        ("step-costs-little-more", one_size(1.3, 1.2), "reproduced"),
        ("step-costs-little-more", one_size(1.3, 2.0), "partly"),
        ("step-costs-little-more", one_size(40.0, 30.0), "not reproduced"),
        ("step-costs-little-more", one_size(1.3, 1.2, shape="toy-1m"), "not measured here"),
        ("speedup-at-steps", one_size(1.3, 1.27), "reproduced"),
        ("speedup-at-steps", one_size(1.3, 3.0), "partly"),
        ("speedup-at-steps", one_size(1.3, 20.0), "not reproduced"),
        ("ratio-flat-over-size", sweep(SIZES, {}), "reproduced"),
        ("ratio-flat-over-size", sweep({"toy-17m": 20.0, "toy-48m": 22.0}, {}), "partly"),
        ("ratio-flat-over-size", sweep({"toy-17m": 20.0, "toy-48m": 42.0}, {}), "not reproduced"),
        ("ratio-flat-over-size", sweep({"toy-17m": 20.0}, {}), "not measured here"),
        ("advantage-falls-with-batch", sweep({}, BATCHES), "reproduced"),
        ("advantage-falls-with-batch", sweep({}, BATCHES, shape="toy-17m"), "partly"),
        ("advantage-falls-with-batch", sweep({}, {1: 20.0, 4: 50.0}), "partly"),
        ("advantage-falls-with-batch", sweep({}, {1: 20.0, 4: 21.0}), "not reproduced"),
        ("advantage-falls-with-batch", sweep({}, {1: 20.0}), "not measured here"),
    ],
)
def test_verdicts(id, results, state):
    verdict = claim(id).verdict(results)
    assert verdict.state == state
    assert bool(verdict.measured) == (state != "not measured here")


def test_published_speedups_follow_from_the_published_times():
    published = LAB["C_speed_model"]
    assert published["canvas_ms"] / published["token_ms"] == pytest.approx(published["ratio"], abs=0.005)
    for steps, value in published["speedup_at_steps"].items():
        assert 256 * published["token_ms"] / (steps * published["canvas_ms"]) == pytest.approx(value, rel=0.002)
    by_batch = LAB["D_size_and_batch"]
    for rows, ratio in by_batch["batch_to_ratio"].items():
        canvas, token = by_batch["batch_to_canvas_ms"][rows], by_batch["batch_to_token_ms"][rows]
        assert canvas / token == pytest.approx(ratio, abs=0.01)
        assert 256 * token / (16 * canvas) == pytest.approx(by_batch["batch_to_speedup_at_16"][rows], abs=0.06)


# -- figures -------------------------------------------------------------------------------------------------


def title(chart) -> str:
    return chart.layout.title.text


def test_costs_say_what_a_step_costs_and_what_is_overhead():
    chart = figures.costs_by_scope(one_size(1.3, 3.0), "toy-69m")
    assert title(chart) == "A denoising step costs 3.0 tokens; 20% of a token's time is no arithmetic"
    assert chart.layout.xaxis.type == "category"  # bars named by words vanish from a linear axis


def test_speedup_says_gain_or_loss():
    published = LAB["C_speed_model"]
    gains = figures.speedup_by_steps(one_size(1.3, 2.0), "toy-69m", published)
    assert title(gains) == "At 12 to 16 steps a canvas this machine gains 7.9 to 10.4 times"
    plain = next(trace for trace in gains.data if trace.name == "this run")
    assert plain.y[15] == pytest.approx(256 / (16 * 2.0))
    loss = figures.speedup_by_steps(one_size(1.3, 40.0), "toy-69m", published)
    assert "runs at 0.40 to 0.53 times the speed" in title(loss)


def test_other_hosts_are_drawn_when_they_measured_the_same(monkeypatch):
    same, other = one_size(1.3, 3.0), one_size(1.3, 3.0, shape="toy-1m")
    same.host, same.started, other.started = "nvidia-h200", "2026-01-01", "2026-01-02"
    monkeypatch.setattr(figures, "everywhere", lambda experiment: [same, other])
    chart = figures.speedup_by_steps(one_size(1.3, 2.0), "toy-69m", LAB["C_speed_model"])
    assert [trace.name for trace in chart.data if "recorded" in (trace.name or "")] == ["nvidia-h200, recorded"]


def test_cells_that_were_not_measured_are_left_out():
    results = sweep({"toy-17m": 20.0}, {1: 5.0, 4: 10.0})
    by_size = figures.ratio_by_size(results, {"toy-17m": 16.9, "toy-48m": 48.5}, LAB["D_size_and_batch"])
    assert list(by_size.data[0].x) == [16.9]
    by_batch = figures.ratio_by_batch(results, "batch", "shape", ["toy-97m"], [1, 2, 4], BATCHES)
    assert list(by_batch.data[0].x) == [1, 4]
    assert "from 5.0 to 10.0 tokens" in title(by_batch)
    nothing = figures.ratio_by_batch(results, "experts", "experts", ["8/2"], [1, 4])
    assert title(nothing).startswith("Not measured here")
    empty = figures.ratio_by_size(sweep({}, {}), {"toy-17m": 16.9}, LAB["D_size_and_batch"])
    assert "what was not measured" in title(empty)


def test_the_map_counts_what_pays():
    chart = figures.speedup_map(sweep({}, {1: 2.0, 4: 16.0}), "batch", [1, 2, 4], shape="toy-97m")
    # at 2 tokens a step all nine step counts gain; at 16, those below 16 steps do: 1, 2, 4, 8, 12
    assert title(chart) == "Block diffusion pays in 14 of 18 combinations of batch and steps"
    assert list(chart.data[0].y) == ["1", "4"]


def test_the_breakdown_stacks_every_component():
    results = Results.begin("04_size_and_batch", {})
    for way in ("canvas", "token"):
        for component in COMPONENTS:
            results.measure("share", "", [0.1], timed=True, way=way, batch=1, component=component)
    chart = figures.breakdown_bars(results, COMPONENTS, [1])
    assert [bar.name for bar in chart.data] == list(COMPONENTS)
    assert sum(bar.y[0] for bar in chart.data) == pytest.approx(100)
    assert title(chart) == "43% of a canvas step is work on the vocabulary"


def test_experts_touched_names_both_shares():
    results = Results.begin("04_size_and_batch", {})
    for way, counts in (("token", [8]), ("canvas", [128])):
        results.measure(
            "experts_touched", "experts", counts, way=way, experts="128/8", batch=1, total=128, expected=8.0
        )
    chart = figures.experts_touched(results, ["128/8"], [1])
    assert title(chart) == "With 128/8 experts a token at batch 1 touches 6% of them, a canvas 100%"
