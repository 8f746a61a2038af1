"""Numbers in prose: quoted from results, with their spread, or a warning that ends the build."""

from __future__ import annotations

import pytest

from dglab_utils.errors import LabError
from dglab_utils.report import results as results_module
from dglab_utils.report.results import Results
from dglab_utils.runs.sphinx_extension import quoted


@pytest.fixture(autouse=True)
def results(monkeypatch):
    """One recorded run of one experiment; no other is known."""
    found = Results.begin("02_waves", {})
    found.measure("steps", "steps", [18, 18, 18], growth=1.0, study="first_lab")
    found.measure("steps", "steps", [30, 31, 33, 34], growth=0.5, study="first_lab")
    found.measure("accepted_per_step", "", [45.8671], bound=0.001)
    found.measure("answer", "ms", [7.0], way="masked, as published")
    monkeypatch.setattr(results_module, "everywhere", lambda name: [found] if name == "02_waves" else [])
    return found


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("02_waves steps growth=1.0", "18 steps"),
        ("02_waves steps growth=0.5 study=first_lab", "32 (30.75–33.25) steps"),
        ("02_waves steps growth=0.5 :.0f", "32 (31–33) steps"),
        ("02_waves accepted_per_step", "45.87"),
        ('02_waves answer way="masked, as published"', "7 ms"),
        ("02_waves accepted_per_step bound=1e-3 :.1f", "45.9"),
    ],
)
def test_a_measurement_is_quoted_with_its_unit_and_its_spread(query, shown, results):
    text, explanation = quoted(query)
    assert text == shown
    assert "median of" in explanation and results.host in explanation


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("02_waves", "write EXPERIMENT NAME"),
        ("02_waves steps growth", "write EXPERIMENT NAME"),
        ('02_waves answer way="masked', "cannot be read (No closing quotation)"),
        ("03_none steps", "03_none: no results yet; run it with `dglab run 03_none`"),
        ("02_waves steps growth=1.0 :wide", "`:wide` is no number format"),
        ("02_waves steps", "2 measurements called 'steps'"),
        ("02_waves step growth=1.0", "0 measurements called 'step'"),
    ],
)
def test_a_quotation_that_finds_nothing_is_refused(query, says):
    with pytest.raises(LabError) as caught:
        quoted(query)
    assert says in str(caught.value)
