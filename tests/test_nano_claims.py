"""Verdicts and figures of notebooks 08 and 09 follow from results: met, met in part, missed, and not measured."""

from __future__ import annotations

import numpy as np
import pytest

from dglab_utils.report import nano_figures as figures
from dglab_utils.report.claims import claim
from dglab_utils.report.results import Results


def spans(copy: float, shuffle: float) -> Results:
    """Steps of the hardest level, where the easiest takes two."""
    made = Results.begin("08_trained_nano", {})
    made.verdict_inputs["steps_by_task"] = {
        "copy": {"easiest": 2.0, "hardest": copy, "beyond": 9.0, "closed": True},
        "shuffle": {"easiest": 2.0, "hardest": shuffle, "beyond": 9.0, "closed": False},
    }
    return made


def curves(closed: tuple, opened: tuple, bounds: tuple = (0.1, 10.0), count: int = 200) -> Results:
    """(right, steps) of each kind at each bound."""
    made = Results.begin("09_quality_tradeoff", {})
    made.verdict_inputs["bounds"] = list(bounds)
    made.verdict_inputs["by_kind"] = {
        kind: {"right": list(right), "steps": list(steps), "count": count}
        for kind, (right, steps) in (("closed", closed), ("open", opened))
    }
    return made


FREE, DEAR = ((0.99, 0.98), (8.0, 4.0)), ((0.99, 0.80), (8.0, 2.0))


@pytest.mark.parametrize(
    ("id", "results", "state"),
    [
        ("steps-follow-difficulty", spans(6.0, 7.0), "reproduced"),
        ("steps-follow-difficulty", spans(2.1, 7.0), "partly"),
        ("steps-follow-difficulty", spans(6.0, 5.9), "partly"),
        ("steps-follow-difficulty", spans(5.9, 5.9), "not reproduced"),
        ("bound-without-loss", curves(FREE, FREE), "reproduced"),
        ("bound-without-loss", curves(FREE, DEAR), "partly"),
        ("bound-without-loss", curves(DEAR, DEAR), "not reproduced"),
        ("bound-without-loss", curves(FREE, FREE, count=199), "not measured here"),
        ("bound-without-loss", curves(FREE, ((0.4, 0.4), (8.0, 2.0))), "not measured here"),
        ("bound-without-loss", curves(((0.9,), (8.0,)), ((0.9,), (8.0,)), bounds=(0.1,)), "not measured here"),
    ],
)
def test_verdicts(id, results, state):
    verdict = claim(id).verdict(results)
    assert verdict.state == state
    assert verdict.because


def test_one_kind_of_task_is_no_verdict():
    results = spans(6.0, 7.0)
    del results.verdict_inputs["steps_by_task"]["shuffle"]
    assert claim("steps-follow-difficulty").verdict(results).state == "not measured here"


def test_models_that_the_lab_does_not_ship_are_drawn_too():
    made = Results.begin("08_trained_nano", {})
    for model in ("nano", "mine", "yours"):
        made.measure("steps", "steps", [2], mean=2.0, task="copy", level=4, model=model)
    lines = figures.by_difficulty(made, "steps", {"copy": ((4,), ())}, "steps", "title").data
    assert [line.name for line in lines] == ["nano", "mine", "yours"]
    assert len({line.line.color for line in lines}) == 3


def test_verdicts_tell_what_was_measured():
    assert (
        "most shuffle 2.0 to 7.0, least copy 2.0 to 2.1"
        in claim("steps-follow-difficulty").verdict(spans(2.1, 7.0)).measured
    )
    told = claim("bound-without-loss").verdict(curves(FREE, DEAR)).measured
    assert "closed: 8.0 to 4.0 steps, 99% to 98% right, 2.0 times fewer steps without loss" in told
    assert "open: 8.0 to 2.0 steps, 99% to 80% right, 1.0 times" in told


def test_difficulty_is_drawn_per_model_and_hollow_where_it_was_never_trained():
    made = Results.begin("08_trained_nano", {})
    for level, share in ((4, 1.0), (8, 0.75), (28, 0.25)):
        made.measure("right", "", [0, 1], mean=share, interval=[share / 2, 1.0], task="copy", level=level, model="nano")
    made.measure("right", "", [0, 1], mean=0.5, interval=[0.4, 0.6], task="copy", level="all", model="nano")
    chart = figures.by_difficulty(made, "right", {"copy": ((4, 8), (28,))}, "share", "title")
    (line,) = chart.data
    assert (line.name, list(line.x), list(line.y)) == ("nano", [4, 8, 28], [1.0, 0.75, 0.25])
    assert list(line.marker.symbol) == ["circle", "circle", "circle-open"]
    assert list(line.error_y.arrayminus) == [0.5, 0.375, 0.125]


def test_entropy_is_the_median_of_what_still_goes():
    chart = figures.entropy_by_step({"nano": [np.array([2.0, 0.0]), np.array([1.0])]}, "title")
    assert list(chart.data[0].y) == [1.5, 0.0]


def test_the_front_holds_what_nothing_beats():
    told = [(2.0, 50.0, (0.1,)), (4.0, 90.0, (1.0,)), (4.0, 80.0, (2.0,)), (8.0, 90.0, (3.0,))]
    chart = figures.pareto({"closed": told}, ("bound",), (3.0,))
    points, front, official = chart.data
    assert len(points.x) == 4
    assert list(zip(front.x, front.y, strict=True)) == [(2.0, 50.0), (4.0, 90.0)]
    assert (list(official.x), list(official.y)) == ([8.0], [90.0])
    assert chart.layout.title.text == "Steps saved by other settings without a loss: closed 2.0 times"


def test_each_box_stands_at_its_task():
    chart = figures.order_by_task({"copy": [0.1, 0.2], "sort": [0.3]}, "a")
    assert [(box.name, list(box.x)) for box in chart.data] == [("copy", [0.1, 0.2]), ("sort", [0.3])]
    assert chart.layout.yaxis.type == "category"
