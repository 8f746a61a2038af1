"""Execution: complete, failed, killed, timed out, interrupted; and which of those may become a page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from small_notebooks import write_notebook

from dglab_utils.errors import LabError
from dglab_utils.runs.catalogue import notebooks_in, plans, read_notebook
from dglab_utils.runs.execute import FAILED, OK, Record, fault_of_run, run_all, summary

pytestmark = pytest.mark.timeout(120)


def run(tmp_path: Path, *, seeds: int = 2, cell_timeout: int = 60) -> list[Record]:
    notebooks = notebooks_in(tmp_path / "notebooks")
    layer = {notebook.name: {"seeds": seeds} for notebook in notebooks}
    return run_all(plans(notebooks, layer), "quick", tmp_path / "quick", cell_timeout)


def fault(tmp_path: Path, name: str) -> str | None:
    return fault_of_run(read_notebook(tmp_path / "notebooks" / f"{name}.ipynb"), tmp_path / "quick")


def errors_in(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [output.evalue for cell in cells for output in cell.get("outputs", []) if output.output_type == "error"]


def test_a_failed_notebook_does_not_stop_the_others_and_keeps_its_traceback(tmp_path, capsys):
    write_notebook(tmp_path / "notebooks", "01_good", "import sys; print(seeds * 10, sys.executable)")
    write_notebook(tmp_path / "notebooks", "02_bad", "1 / 0")
    write_notebook(tmp_path / "notebooks", "03_good", "print('after')")
    records = run(tmp_path, seeds=4)
    assert [record.status for record in records] == [OK, FAILED, OK]
    folder = tmp_path / "quick"
    assert sorted(p.name for p in folder.iterdir()) == [
        "01_good.ipynb", "01_good.json", "02_bad.failed.ipynb", "02_bad.failed.json", "03_good.ipynb", "03_good.json",
    ]  # fmt: skip
    first = nbformat.read(folder / "01_good.ipynb", as_version=4)
    printed = "".join(o.text for c in first.cells for o in c.get("outputs", []) if o.output_type == "stream")
    assert f"40 {sys.executable}" in printed, "the parameter and this environment's interpreter reach the kernel"
    failed = nbformat.read(folder / "02_bad.failed.ipynb", as_version=4)
    assert any(
        "ZeroDivisionError" in line
        for c in failed.cells
        for o in c.get("outputs", [])
        for line in o.get("traceback", [])
    )
    assert fault(tmp_path, "01_good") is None
    assert "division by zero" in (fault(tmp_path, "02_bad") or "")
    record = Record.load(folder / "01_good.json")
    assert record.parameters == {"seeds": 4} and record.profile == "quick" and record.seconds > 0
    assert "01_good cell 4/4" in capsys.readouterr().err, "the progress bar names the notebook and the cell"
    assert "2 of 3 notebooks complete" in summary(records, folder)


def test_a_killed_kernel_is_a_failure(tmp_path):
    write_notebook(tmp_path / "notebooks", "01_killed", "import os\nos.kill(os.getpid(), 9)")
    (record,) = run(tmp_path)
    assert record.status == FAILED and "DeadKernelError" in record.error and record.error.startswith("cell 3:")
    failed = tmp_path / "quick" / "01_killed.failed.ipynb"
    assert any("died" in evalue for evalue in errors_in(failed)), "the reason stands in the cell that ran"
    states = [c.metadata.papermill.status for c in nbformat.read(failed, as_version=4).cells]
    assert states[-2:] == ["failed", "pending"], "what papermill marked completed is taken back"
    assert not (tmp_path / "quick" / "01_killed.ipynb").exists()
    assert "latest run failed" in (fault(tmp_path, "01_killed") or "")


def test_a_cell_that_takes_too_long_is_a_failure(tmp_path):
    write_notebook(tmp_path / "notebooks", "01_slow", "import time\ntime.sleep(60)")
    (record,) = run(tmp_path, cell_timeout=2)
    assert record.status == FAILED and "CellTimeoutError" in record.error
    assert errors_in(tmp_path / "quick" / "01_slow.failed.ipynb")
    assert not (tmp_path / "quick" / "01_slow.ipynb").exists()


@pytest.mark.parametrize(
    ("cells", "complete", "reason"),
    [
        ((), False, "not tagged `complete`"),
        (("import builtins\nbuiltins.print = lambda *a: None",), True, "did not print"),
    ],
)
def test_without_the_completion_marker_a_run_is_not_complete(tmp_path, cells, complete, reason):
    write_notebook(tmp_path / "notebooks", "01_open", *cells, complete=complete)
    (record,) = run(tmp_path)
    assert record.status == FAILED and reason in record.error


def test_a_failure_leaves_the_earlier_run_and_is_not_hidden_by_it(tmp_path):
    path = write_notebook(tmp_path / "notebooks", "01_moody", "assert seeds < 4, 'too many'")
    run(tmp_path)
    before = (tmp_path / "quick" / "01_moody.ipynb").read_bytes()
    assert fault(tmp_path, "01_moody") is None
    run(tmp_path, seeds=5)
    assert (tmp_path / "quick" / "01_moody.ipynb").read_bytes() == before
    assert "too many" in (fault(tmp_path, "01_moody") or "")
    run(tmp_path, seeds=3)
    assert fault(tmp_path, "01_moody") is None, "a complete run replaces both"
    assert not list((tmp_path / "quick").glob("*.failed.*"))
    # The notebook changes: what was run is no longer what is there.
    path.write_text(path.read_text().replace("too many", "far too many"))
    assert "older than the notebook" in (fault(tmp_path, "01_moody") or "")


def test_a_run_that_was_tampered_with_or_cut_off_is_not_published(tmp_path):
    write_notebook(tmp_path / "notebooks", "01_good")
    assert "not run with the profile 'quick'" in (fault(tmp_path, "01_good") or "")
    run(tmp_path)
    path = tmp_path / "quick" / "01_good.ipynb"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert "cannot be read" in (fault(tmp_path, "01_good") or "")
    path.write_text(text)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    partial = tmp_path / "quick" / f"01_good.{gone.pid}.partial.ipynb"
    partial.write_text(text)
    assert "has not ended" in (fault(tmp_path, "01_good") or "")
    running = tmp_path / "quick" / f"01_good.{os.getppid()}.partial.ipynb"
    running.write_text(text)
    run(tmp_path)
    assert not partial.exists(), "a killed attempt is forgotten when a later one is complete"
    assert running.exists() and "has not ended" in (fault(tmp_path, "01_good") or ""), "one that goes on is not"
    running.unlink()
    (tmp_path / "quick" / "01_good.json").write_text("{")
    with pytest.raises(LabError, match=r"01_good\.json: not a run's record"):
        fault(tmp_path, "01_good")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parameters": [1]}, "parameters = [1] is no dict"),
        ({"seconds": "x"}, "seconds = 'x' is no float"),
        ({"seconds": True}, "seconds = True is no float"),
        ({"started": None}, "started = None is no str"),
        ({"source_digest": 5}, "source_digest = 5 is no str"),
        ({"error": ["a"]}, "error = ['a'] is no str"),
        ({"unknown": 1}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_a_record_with_a_field_of_the_wrong_type_is_named(tmp_path, changes, told):
    path = tmp_path / "01_good.json"
    whole = {"notebook": "01_good", "profile": "quick", "seconds": 3}
    path.write_text(json.dumps(whole))
    assert Record.load(path).seconds == 3
    path.write_text(json.dumps(whole | changes))
    with pytest.raises(LabError) as caught:
        Record.load(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: not a run's record (") and told in line and line.endswith("run the notebook again")


def test_ctrl_c_ends_the_kernel_and_keeps_what_was_finished(tmp_path):
    """A real SIGINT to a real `dglab run`, again and again, while the second of three notebooks sleeps."""
    pid_file = tmp_path / "kernel.pid"
    write_notebook(tmp_path / "notebooks", "01_first")
    sleeper = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    write_notebook(tmp_path / "notebooks", "02_sleeps", sleeper)
    write_notebook(tmp_path / "notebooks", "03_never")
    (tmp_path / "mine.yaml").write_text("all: {seeds: 3}\n")
    command = [sys.executable, "-m", "dglab_utils.runs", "run", "--profile", str(tmp_path / "mine.yaml")]
    command += ["--notebooks", str(tmp_path / "notebooks"), "--runs", str(tmp_path / "runs")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, "the second notebook never started"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "02_sleeps" in output and "interrupted" in output
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    folder = tmp_path / "runs" / "mine"
    assert sorted(p.name for p in folder.iterdir()) == [
        "01_first.ipynb", "01_first.json", "02_sleeps.failed.ipynb", "02_sleeps.failed.json",
    ]  # fmt: skip
    assert json.loads((folder / "02_sleeps.failed.json").read_text())["status"] == "interrupted"
    assert json.loads((folder / "01_first.json").read_text())["parameters"] == {"seeds": 3}
