"""Results on disk: read back whole, refused in one line when damaged, equal where they must be."""

from __future__ import annotations

import json
import re

import pytest

from dglab_utils.errors import LabError
from dglab_utils.measure.records import Measurement
from dglab_utils.report import results as module
from dglab_utils.report.results import Results, everywhere, read, slug


@pytest.fixture
def results() -> Results:
    made = Results.begin("00_probe", {"seeds": 2})
    made.measure("steps", "steps", [31, 31, 33], growth=0.5)
    made.measure("steps", "steps", [18], growth=1.0)
    made.measure("wall", "ms", [1.0, 2.0], timed=True)
    made.digests["tokens"] = "ab" * 32
    made.verdict_inputs["cap"] = 48
    return made


def test_round_trip(results, tmp_path):
    path = results.save(tmp_path)
    assert path == tmp_path / results.host / "00_probe.json"
    again = read(path)
    assert again.measurements == results.measurements
    assert again.deterministic() == results.deterministic()
    assert again.environment["versions"]["torch"]
    assert again.seconds > 0
    assert [p.name for p in path.parent.iterdir()] == ["00_probe.json"]


def test_the_spread_is_the_samples(results):
    assert results.find("steps", growth=0.5) == Measurement("steps", "steps", 31, 31, 32, 3, {"growth": 0.5})


def test_durations_do_not_enter_the_deterministic_part(results):
    other = Results.begin("00_probe", {"seeds": 2})
    other.measure("steps", "steps", [31, 31, 33], growth=0.5)
    other.measure("steps", "steps", [18], growth=1.0)
    other.measure("wall", "ms", [7.0], timed=True)
    other.digests["tokens"] = "ab" * 32
    other.verdict_inputs["cap"] = 48
    assert other.deterministic() == results.deterministic()
    other.verdict_inputs["cap"] = 47
    assert other.deterministic() != results.deterministic()


def test_find_wants_exactly_one(results):
    with pytest.raises(LabError, match="2 measurements called 'steps'"):
        results.find("steps")
    with pytest.raises(LabError, match=r"0 measurements called 'stops' .* names there: steps, wall"):
        results.find("stops")
    with pytest.raises(LabError, match="no bound"):
        results.verdict_input("bound")


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_must_be_there_and_finite(results, samples):
    with pytest.raises(LabError, match="measurement broken"):
        results.measure("broken", "", samples)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "not a results file"),
        (lambda text: "", "not a results file"),
        (lambda text: "[]", "field schema is 'list'"),
        (lambda text: text.replace('"schema": 1', '"schema": 7'), "field schema is 7, this version reads 1"),
        (lambda text: text.replace('"digests"', '"digest"'), "field digests is missing"),
        (lambda text: text.replace('"q1"', '"quartile"', 1), "field measurements"),
        (lambda text: text.replace('"host"', '"extra": 1, "host"', 1), "unknown field extra"),
    ],
)
def test_damaged_files_are_named(results, tmp_path, damage, told):
    path = results.save(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(LabError, match=rf"00_probe\.json: .*{told}") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(LabError, match="no such results file"):
        read(tmp_path / "absent.json")


ABSENT = object()


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (("host",), "../esc", "field host is '../esc', which cannot name a file"),
        (("host",), "..", "field host"),
        (("host",), "a\\b", "field host"),
        (("host",), "", "field host"),
        (("host",), 3, "field host is missing or of the wrong type"),
        (("experiment",), "../../01", "field experiment"),
        (("seconds",), True, "field seconds"),
        (("seconds",), float("nan"), "field seconds"),
        (("parameters",), [1], "field parameters"),
        (("parameters", "bound"), float("nan"), "field parameters holds a number that is not finite"),
        (("verdict_inputs",), None, "field verdict_inputs"),
        (("verdict_inputs", "cap"), [float("inf")], "field verdict_inputs holds a number that is not finite"),
        (("digests", "tokens"), 7, "field digests"),
        (("environment", "versions"), ABSENT, "field environment.versions is missing"),
        (("environment", "versions"), [], "field environment.versions"),
        (("environment", "versions", "transformers"), ABSENT, "field environment.versions.transformers"),
        (("environment", "hardware"), "big", "field environment.hardware"),
        (("measurements", 1), "steps", "field measurements[1] is of the wrong type"),
        (("measurements", 1, "name"), None, "field measurements[1].name"),
        (("measurements", 1, "unit"), 5, "field measurements[1].unit"),
        (("measurements", 1, "median"), "18", "field measurements[1].median"),
        (("measurements", 1, "median"), ABSENT, "field measurements[1].median"),
        (("measurements", 1, "q1"), float("nan"), "field measurements[1].q1"),
        (("measurements", 1, "q3"), True, "field measurements[1].q3"),
        (("measurements", 1, "q3"), 10**400, "field measurements[1].q3"),
        (("measurements", 1, "count"), 0, "field measurements[1].count"),
        (("measurements", 1, "count"), 1.0, "field measurements[1].count"),
        (("measurements", 1, "labels"), None, "field measurements[1].labels"),
        (("measurements", 1, "timed"), 1, "field measurements[1].timed"),
        (("measurements", 1, "extra"), 1, "unknown field measurements[1].extra"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(results, tmp_path, at, value, told):
    path = results.save(tmp_path)
    content = json.loads(path.read_text())
    *way, last = at
    place = content
    for step in way:
        place = place[step]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(LabError, match=rf"00_probe\.json: {re.escape(told)}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": ' + "1" * 5000 + "}", "\xff"])
def test_a_file_that_json_itself_refuses_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(LabError, match=r"x\.json: not a results file"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize(("field", "name"), [("host", "../esc"), ("host", "/esc"), ("experiment", "../../esc")])
def test_nothing_is_written_outside_the_folder(results, tmp_path, field, name):
    setattr(results, field, name)
    with pytest.raises(LabError, match="esc' cannot name a file"):
        results.save(tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_cuda_without_a_gpu_is_one_line(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LabError, match=r"^device = 'cuda', but PyTorch finds no CUDA device .*; use cpu$"):
        Results.begin("00_probe", {"device": "cuda"})


def test_a_failed_save_keeps_what_was_there(results, tmp_path):
    path = results.save(tmp_path)
    before = path.read_bytes()
    results.verdict_inputs["worse"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        results.save(tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["00_probe.json"]


def test_a_relative_folder_is_taken_from_the_checkout(results, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert results.save("kept/here") == tmp_path / "kept" / "here" / results.host / "00_probe.json"


def test_fresh_runs_come_first(results, tmp_path):
    fresh, recorded = tmp_path / "fresh", tmp_path / "recorded"
    results.save(fresh)
    for host in ("nvidia-b", "cpu-a"):
        results.host = host
        results.save(recorded)
    assert [r.host for r in everywhere("00_probe", fresh, recorded)][1:] == ["cpu-a", "nvidia-b"]
    assert everywhere("absent", fresh, recorded) == []


def test_slugs():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("Intel(R) Xeon(R) Processor @ 2.10GHz") == "xeon"
    assert slug("AMD EPYC 7763 64-Core Processor") == "epyc-7763"
    assert slug("") == "unknown"


def test_equal_results_are_equal_bytes(results):
    assert json.loads(results.deterministic())["experiment"] == "00_probe"


def test_prose_quotes_the_first_run_that_has_it(results, tmp_path, monkeypatch):
    fresh, recorded = tmp_path / "fresh", tmp_path / "recorded"
    monkeypatch.setattr(module, "everywhere", lambda experiment: everywhere(experiment, fresh, recorded))
    with pytest.raises(LabError, match="no results yet; run it with"):
        module.quoted("00_probe", "steps", growth=0.5)
    results.save(recorded)
    results.measurements = [m for m in results.measurements if m.labels != {"growth": 0.5}]
    results.host = "fresh-one"
    results.save(fresh)
    assert module.quoted("00_probe", "steps", growth=1.0)[1].host == "fresh-one"
    assert module.quoted("00_probe", "steps", growth=0.5)[1].host != "fresh-one"
    with pytest.raises(LabError, match=r"0 measurements called 'steps' with .'growth': 9"):
        module.quoted("00_probe", "steps", growth=9)
