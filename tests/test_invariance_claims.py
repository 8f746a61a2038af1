"""Verdicts and figures of notebook 07 follow from results: met, met in part, missed, and not measured."""

from __future__ import annotations

import numpy as np
import pytest

from dglab_utils.report import invariance_figures as figures
from dglab_utils.report.claims import claim
from dglab_utils.report.results import Results

ROUTER, ATTENTION = "model.decoder.layers.0.router.proj, aten.mm.default", "model.decoder.layers.0.self_attn, aten.bmm"


def run(text=0, stop=0, any=0, first="", report_fix=None, dtype="bfloat16", prompts=24, model="nano"):
    return {
        "model": model,
        "dtype": dtype,
        "prompts": prompts,
        "text": text,
        "stop": stop,
        "any": any,
        "first": first,
        "helps": "",
        "report_fix": report_fix,
    }


def runs(*of):
    made = Results.begin("07_batch_reproducibility", {})
    made.verdict_inputs["runs"] = list(of)
    return made


SINGLE = run(dtype="float32", text=24, any=24)


@pytest.mark.parametrize(
    ("id", "results", "state"),
    [
        ("batch-changes-text", runs(run(text=12, any=20)), "reproduced"),
        ("batch-changes-text", runs(run(text=11, any=20)), "partly"),
        ("batch-changes-text", runs(run(any=1)), "partly"),
        ("batch-changes-text", runs(run()), "not reproduced"),
        ("batch-changes-text", runs(SINGLE), "not measured here"),
        ("batch-changes-text", runs(run(prompts=0, any=1)), "not measured here"),
        ("router-differs-first", runs(run(first=ROUTER)), "reproduced"),
        ("router-differs-first", runs(run(first=ROUTER), run(first=ATTENTION, model="toy-17m")), "partly"),
        ("router-differs-first", runs(run(first=ATTENTION)), "not reproduced"),
        ("router-differs-first", runs(run()), "not measured here"),
        ("two-parts-row-by-row", runs(run(any=1, report_fix=True)), "reproduced"),
        (
            "two-parts-row-by-row",
            runs(run(any=1, report_fix=True), run(any=1, report_fix=False, model="toy-17m")),
            "partly",
        ),
        ("two-parts-row-by-row", runs(run(any=1, report_fix=False)), "not reproduced"),
        ("two-parts-row-by-row", runs(run(report_fix=True)), "not measured here"),
        ("two-parts-row-by-row", runs(run(any=1)), "not measured here"),
    ],
)
def test_verdicts(id, results, state):
    verdict = claim(id).verdict(results)
    assert verdict.state == state
    assert verdict.because


def test_a_map_has_a_row_a_part_and_a_column_a_layer():
    shares = {
        "model.encoder.layers.0.self_attn": 0.0,
        "model.decoder.layers.0.self_attn": 0.25,
        "model.decoder.layers.0.mlp": 0.5,
        "model.decoder.layers.1.self_attn": 1.0,
        "lm_head": 1.0,
    }
    encoder, decoder, outside = figures.divergence_map(shares, "a").data
    assert list(encoder.y) == ["self_attn"] and list(encoder.z[0]) == [0.0]
    assert list(decoder.y) == ["self_attn", "mlp"] and list(decoder.x) == ["0", "1"]
    assert [list(row) for row in decoder.z] == [[25.0, 100.0], [50.0, None]]
    assert list(outside.y) == ["lm_head"] and list(outside.z[0]) == [100.0]


def test_growth_leaves_out_what_has_stopped():
    (line,) = figures.growth({"nano": [[0.0, 0.5], [0.0, 0.5, 1.0]]}, "a").data
    assert list(line.y) == [0.0, 50.0, 100.0] and list(line.x) == [1, 2, 3]


def test_costs_are_ratios_of_the_same_round():
    times = {rows: {"plain": np.array([1.0, 2.0, 4.0]), "slow": np.array([2.0, 4.0, 8.0])} for rows in (1, 4)}
    (line,) = figures.cost_by_batch(times, "plain", "a").data
    assert list(line.x) == [1, 4] and list(line.y) == [2.0, 2.0]
    assert not any(line.error_y.array) and not any(line.error_y.arrayminus)


def test_what_another_precision_showed_is_said():
    told = claim("batch-changes-text").verdict(runs(run(), SINGLE))
    assert told.state == "not reproduced" and "float32 (24 of 24 requests)" in told.because
