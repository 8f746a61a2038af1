"""Verdicts follow from results: met, missed, and not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dglab_utils.errors import LabError
from dglab_utils.report.claims import CLAIMS, Verdict, claim
from dglab_utils.report.reference import reference
from dglab_utils.report.results import Results
from dglab_utils.report.tables import hosts_table, verdict_table


def untrained(
    *,
    accepted=1.0,
    last=6.83,
    low=0.1,
    high=5.3,
    sharp=(1.0, 43.0),
    sharp_stopped=0,
    stopped=0,
    most=1,
    cap=48,
    trained=None,
) -> Results:
    made = Results.begin("01_untrained_model", {})
    for eos, tokens in (("none", [5.3333] * 2), ("set", [low, high])):
        made.measure("steps", "steps", [48] * 2, eos=eos)
        made.measure("accepted_per_step", "positions", [accepted] * 2, eos=eos)
        made.measure("mean_entropy_first", "nats", [6.89] * 2, eos=eos)
        made.measure("mean_entropy_last", "nats", [last] * 2, eos=eos)
        made.measure("tokens_per_forward", "tokens a forward", tokens, eos=eos)
    for factor, value in zip((1.0, 30.0), sharp, strict=True):
        made.measure("accepted_per_step", "positions", [value], sharpness=factor)
    made.verdict_inputs = {
        "max_denoising_steps": cap,
        "runs_stopped": stopped,
        "most_accepted_in_a_step": most,
        "uniform_entropy": 6.9078,
        "tokens_per_forward_range": [low, high],
        "sharpness": [1.0, 30.0],
        "sharp_runs_stopped": sharp_stopped,
    }
    if trained is not None:
        made.verdict_inputs["trained"] = {"model": "nano", "canvases": 16, "stopped": trained, "steps": 3}
    return made


def waves(
    *,
    growth_shift=0,
    accepted_shift=0.0,
    bound_steps=(18, 18, 18, 18),
    coupled=(27, 16),
    bounds=(0.1, 10.0),
    cap=48,
    trained=None,
) -> Results:
    made = Results.begin("02_commit_waves", {})
    published = reference("first_lab")["B_commit_waves"]
    for growth, steps in published["growth_to_steps"].items():
        made.measure("steps", "steps", [steps + growth_shift], study="first_lab", growth=growth)
    for (bound, accepted), steps in zip(published["bound_to_mean_accepted"].items(), bound_steps, strict=True):
        made.measure("accepted_per_step", "", [accepted + accepted_shift], study="first_lab", bound=bound)
        made.measure("steps", "steps", [steps], study="first_lab", bound=bound)
    row = {"pull": 16.0, "tight": bounds[0], "loose": bounds[1], "steps_tight": coupled[0], "steps_loose": coupled[1]}
    no_pull = {**row, "pull": 0.0, "steps_tight": 31, "steps_loose": 31}
    made.verdict_inputs = {"max_denoising_steps": cap, "steps_by_pull": [no_pull, row]}
    if trained is not None:
        ends = {"tight": 0.01, "loose": 10.0, "steps_tight": trained[0], "steps_loose": trained[1]}
        unmoved = {"task": "copy", **ends, "steps_loose": trained[0]}
        made.verdict_inputs["steps_of_trained"] = [unmoved, {"task": "sum", **ends}]
    return made


@pytest.mark.parametrize(
    ("id", "results", "state"),
    [
        ("untrained-never-stops", untrained(), "reproduced"),
        ("untrained-never-stops", untrained(stopped=1), "not reproduced"),
        ("untrained-never-stops", untrained(most=2), "not reproduced"),
        ("untrained-uniform-entropy", untrained(), "partly"),
        ("untrained-uniform-entropy", untrained(last=6.91), "reproduced"),
        ("untrained-uniform-entropy", untrained(last=6.7), "not reproduced"),
        ("untrained-tokens-per-forward", untrained(), "partly"),
        ("untrained-tokens-per-forward", untrained(low=2.0), "not reproduced"),
        ("confidence-is-trained", untrained(), "partly"),
        ("confidence-is-trained", untrained(sharp=(1.0, 10.0)), "partly"),
        ("confidence-is-trained", untrained(sharp_stopped=1), "not reproduced"),
        ("confidence-is-trained", untrained(sharp=(1.0, 1.1)), "reproduced"),
        ("confidence-is-trained", untrained(trained=16), "partly"),
        ("confidence-is-trained", untrained(trained=8), "not reproduced"),
        ("confidence-is-trained", untrained(sharp_stopped=1, trained=16), "not reproduced"),
        ("growth-sets-steps", waves(), "reproduced"),
        ("growth-sets-steps", waves(growth_shift=1), "not reproduced"),
        ("bound-sets-accepted", waves(), "reproduced"),
        ("bound-sets-accepted", waves(accepted_shift=0.1), "not reproduced"),
        ("bound-is-a-speed-knob", waves(), "partly"),
        ("bound-is-a-speed-knob", waves(coupled=(27, 27)), "not reproduced"),
        ("bound-is-a-speed-knob", waves(coupled=(16, 27)), "not reproduced"),
        ("bound-is-a-speed-knob", waves(bound_steps=(20, 18, 16, 14)), "reproduced"),
        ("bound-is-a-speed-knob", waves(trained=(30.0, 9.0)), "partly"),
        ("bound-is-a-speed-knob", waves(trained=(9.0, 9.0)), "not reproduced"),
    ],
)
def test_verdicts(id, results, state):
    verdict = claim(id).verdict(results)
    assert verdict.state == state
    assert verdict.measured
    assert verdict.because
    assert verdict.host == results.host


def test_every_claim_says_when_it_was_not_measured():
    for c in CLAIMS:
        verdict = c.verdict(Results.begin(c.experiment, {}))
        assert (verdict.state, verdict.measured) == ("not measured here", "")
        assert "\n" not in verdict.because


@pytest.mark.parametrize("results", [untrained(cap=2), waves(cap=2)], ids=["A", "B"])
def test_runs_under_another_cap_decide_nothing(results):
    for c in (c for c in CLAIMS if c.experiment == results.experiment):
        assert c.verdict(results).state == "not measured here", c.id


def test_one_bound_alone_is_no_comparison():
    verdict = claim("bound-is-a-speed-knob").verdict(waves(bounds=(0.1, 0.1)))
    assert verdict.state == "not measured here"


def test_tokens_per_forward_tells_what_was_accepted():
    assert "accepted a step: 60.00" in claim("untrained-tokens-per-forward").verdict(untrained(accepted=60.0)).measured


def test_a_run_that_leaves_a_published_point_out_is_no_verdict():
    results = waves()
    results.measurements = [m for m in results.measurements if m.labels.get("growth") != 0.5]
    assert claim("growth-sets-steps").verdict(results).state == "not measured here"


@pytest.mark.parametrize(
    ("id", "name", "value"),
    [
        ("untrained-uniform-entropy", "uniform_entropy", None),
        ("untrained-tokens-per-forward", "tokens_per_forward_range", [1.0]),
        ("confidence-is-trained", "sharpness", []),
        ("bound-is-a-speed-knob", "steps_by_pull", ["16", "27"]),
    ],
)
def test_inputs_of_the_wrong_shape_are_no_verdict(id, name, value):
    results = waves() if id == "bound-is-a-speed-knob" else untrained()
    results.verdict_inputs[name] = value
    verdict = claim(id).verdict(results)
    assert (verdict.state, verdict.host) == ("not measured here", results.host)
    assert f"{results.experiment} on {results.host}: {id} cannot be read" in verdict.because
    assert "\n" not in verdict.because


def test_without_results_given_the_first_run_that_tells_decides(monkeypatch):
    silent, telling = Results.begin("02_commit_waves", {}), waves()
    telling.host = "recorded-host"
    for runs, state, host in (
        ([], "not measured here", ""),
        ([silent], "not measured here", silent.host),
        ([silent, telling], "reproduced", "recorded-host"),
    ):
        monkeypatch.setattr("dglab_utils.report.claims.everywhere", lambda _, runs=runs: runs)
        verdict = claim("growth-sets-steps").verdict()
        assert (verdict.state, verdict.host) == (state, host)


def test_ids_are_unique_and_unknown_ones_are_told():
    assert len({c.id for c in CLAIMS}) == len(CLAIMS)
    with pytest.raises(LabError, match="no claim 'nothing'"):
        claim("nothing")


def test_the_table_escapes_and_marks_its_verdicts():
    hostile = {field: f"<script>{field} & co</script>" for field in ("text", "source", "published")}
    judge = lambda _: Verdict("partly", "1 < 2", "<img src=x onerror=alert(1)>")  # noqa: E731
    table = verdict_table([replace(claim("growth-sets-steps"), judge=judge, **hostile)], waves())
    assert "<script" not in table and "<img" not in table
    for field in hostile:
        assert f"&lt;script&gt;{field} &amp; co&lt;/script&gt;" in table
    assert "<td>1 &lt; 2</td>" in table
    table = verdict_table([claim("growth-sets-steps")], waves())
    assert 'class="dglab-verdict dglab-reproduced">reproduced<' in table
    assert "growth 0.5: 31" in table


def test_hosts_are_shown_with_their_spread(monkeypatch):
    here, there = untrained(), untrained(low=0.2)
    there.host, there.started = "nvidia-h200", "2026-01-01T00:00:00+00:00"
    monkeypatch.setattr("dglab_utils.report.tables.everywhere", lambda _: [here, there])
    columns = {"tokens": ("tokens_per_forward", {"eos": "set"}), "none": ("absent", {})}
    table = hosts_table(here, columns)
    assert table.count("<tr>") == 3
    assert "2.7 (1.4 to 4), n = 2" in table
    assert "nvidia-h200 (recorded, 2026-01-01" in table
    assert table.count("not measured") == 2


def test_reference_files(tmp_path):
    with pytest.raises(LabError, match=r"no such reference file; there are .*first_lab"):
        reference("absent")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(LabError, match=r"broken\.yaml: not YAML"):
        reference("broken", tmp_path)
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(LabError, match="holds list, want a mapping"):
        reference("list", tmp_path)
