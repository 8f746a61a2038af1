"""The cost explorer's notebook output: what it holds, and what it refuses. Its page is tested in a browser."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict

import pytest

from dglab_utils.errors import LabError
from dglab_utils.measure.costs import ENGINE, PRECISIONS, Efficiency, Hardware, ModelShape
from dglab_utils.measure.costs_published import against_published, published_rows
from dglab_utils.report import cost_figures
from dglab_utils.report.cost_explorer import START, cost_explorer
from dglab_utils.report.reference import reference

SHAPE = ModelShape.from_mapping("real", reference("model_shapes")["diffusiongemma-26B-A4B"])
CARDS = [Hardware.from_mapping(name, figures) for name, figures in reference("hardware").items()]
EFFICIENCY = Efficiency(0.9, 0.7, 1e-4)


def explorer(**changes) -> str:
    how = {"software": ENGINE, "efficiency": EFFICIENCY, **changes}
    return cost_explorer(SHAPE, CARDS, list(PRECISIONS.values()), **how).data


def test_it_holds_the_records_as_they_are() -> None:
    content = json.loads(html.unescape(re.search('data-model="([^"]*)"', explorer()).group(1)))
    assert content["shape"] == asdict(SHAPE)
    assert content["hardware"] == [asdict(card) for card in CARDS]
    assert [p["name"] for p in content["precisions"]] == list(PRECISIONS)
    assert (content["software"], content["efficiency"]) == (asdict(ENGINE), asdict(EFFICIENCY))
    assert content["start"] == START


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (START | {"hardware": "abacus"}, "hardware is 'abacus'; there is H100 SXM"),
        (START | {"precision": "int1"}, "precision is 'int1'; there is float32, bf16"),
        ({k: v for k, v in START.items() if k != "steps"}, "no steps; there must be hardware"),
    ],
)
def test_a_start_that_is_not_there_is_refused(start, message) -> None:
    with pytest.raises(LabError, match=message):
        explorer(start=start)


def test_the_table_of_errors_leaves_no_row_out() -> None:
    engines = reference("engines")
    rows = published_rows(engines)
    cards = {card.name: card for card in CARDS}
    against = against_published(rows, SHAPE, cards, EFFICIENCY)
    shown = re.findall(r"<tr><td>.*?</tr>", cost_figures.errors_table(against))
    assert len(shown) == len(rows) == len(engines["rows"])
    for row, line in zip(against, shown, strict=True):
        assert html.escape(row.published.what) in line and html.escape(row.published.source) in line
        if row.predicted is None:
            assert "cannot say" in line and html.escape(row.published.why) in line
        elif row.published.use == "predict":
            assert f"{row.error:+.0%}" in line


def test_bars_stand_on_names() -> None:
    chart = cost_figures.explained(["token", "step"], [1.0, 20.0], [1.1, 19.0], "title")
    assert chart.layout.xaxis.type == "category"
    stacked = cost_figures.step_by_component([1, 8], [{"attention": 1.0, "rest": 3.0}] * 2, "title")
    assert stacked.layout.xaxis.type == "category"
    assert [sum(column) for column in zip(*(bar.y for bar in stacked.data), strict=True)] == [100, 100]
