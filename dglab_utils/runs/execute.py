"""Runs notebooks with papermill, all in one process, and keeps what they did.

For each notebook NAME a run folder (build/runs/<profile>/) holds one of:

    NAME.ipynb + NAME.json                 a complete run, and its record
    NAME.failed.ipynb + NAME.failed.json   the latest attempt, when it failed or was interrupted: with its traceback
    NAME.<process>.partial.ipynb           an attempt that is going on, or whose process was killed

A complete run is never touched by a later attempt that fails: both stay on disk. But it no longer counts: as long as
a failed or partial attempt lies beside it, `fault_of_run` reports that, and no page is made. A complete attempt
replaces the run and removes the other two.

papermill's return is not enough to call a run complete: after a killed kernel or a timeout it leaves cells marked
"completed". A run is complete when papermill returned, no cell holds an error, and the last code cell (tagged
`complete`) printed `complete: NAME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from dglab_utils.errors import LabError
from dglab_utils.paths import written
from dglab_utils.runs.catalogue import Notebook, Plan

OK, FAILED, INTERRUPTED = "ok", "failed", "interrupted"


@dataclass(frozen=True)
class Record:
    """What is kept beside an executed notebook.

    Attributes:
        notebook, profile, parameters: what was run.
        status: `ok`, `failed` or `interrupted`.
        error: one line; "" where the status is `ok`.
        started: ISO 8601, UTC.
        seconds: wall-clock, kernel start included.
        source_digest: `Notebook.digest` of the notebook as it was then.
    """

    notebook: str
    profile: str
    parameters: dict[str, Any] = field(default_factory=dict)
    status: str = OK
    error: str = ""
    started: str = ""
    seconds: float = 0.0
    source_digest: str = ""

    def save(self, path: Path) -> None:
        with written(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Reads what `save` wrote.

        Raises:
            LabError: not there, or not what `save` wrote.
        """
        try:
            record = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise LabError(f"{path}: not a run's record ({error}); run the notebook again") from None
        for name, annotation in get_type_hints(cls).items():
            kind = get_origin(annotation) or annotation
            value = getattr(record, name)
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise LabError(
                    f"{path}: not a run's record ({name} = {value!r} is no {kind.__name__}); run the notebook again"
                )
        return record


def run_all(plans: Sequence[Plan], profile: str, folder: Path, cell_timeout: int) -> list[Record]:
    """Runs every plan; a failure does not stop those that follow, an interruption (Ctrl-C) does.

    Args:
        profile: its name, for the records.
        folder: where the runs of this profile are kept.
        cell_timeout: seconds one cell may take.

    Returns:
        A record for each plan that was started.
    """
    total = sum(_code_cells(plan.notebook) for plan in plans)
    records: list[Record] = []
    with tqdm(total=total, unit="cell", desc="starting", mininterval=0.5) as bar:
        for plan in plans:
            end = bar.n + _code_cells(plan.notebook)
            record = run_one(plan, profile, folder, cell_timeout, progress=bar)
            records.append(record)
            bar.update(end - bar.n)  # a failed notebook's remaining cells are done with, too
            bar.write(_line(record), file=sys.stderr)
            if record.status == INTERRUPTED:
                break
    return records


def run_one(plan: Plan, profile: str, folder: Path, cell_timeout: int, progress: tqdm | None = None) -> Record:
    """Runs one notebook and files it as complete, failed or interrupted (see the module's opening)."""
    notebook, partial = plan.notebook, folder / f"{plan.notebook.name}.{os.getpid()}.partial.ipynb"
    folder.mkdir(parents=True, exist_ok=True)
    running = _RunningCell(notebook.name, _code_cells(notebook), progress)
    started, clock = datetime.now(UTC), time.perf_counter()
    status, error = OK, ""
    try:
        with _quiet_interrupts():
            papermill.execute_notebook(
                str(notebook.path),
                str(partial),
                parameters=plan.values,
                kernel_name="python3",
                language="python",
                kernel_manager_class=ThisPython,
                progress_bar=False,
                execution_timeout=cell_timeout,
                on_cell_start=running.starts,
                on_cell_complete=running.ends,
            )
    except KeyboardInterrupt:
        status, error = INTERRUPTED, f"interrupted in cell {running.number}"
    except PapermillExecutionError as failure:  # the cell's own exception; papermill kept its traceback
        status, error = FAILED, f"cell {running.number}: {failure.ename}: {_first_line(failure.evalue)}"
    except Exception as failure:  # a dead kernel, a timeout, a kernel that does not start: one notebook's failure
        status, error = FAILED, f"cell {running.number}: {type(failure).__name__}: {_first_line(str(failure))}"
    if status == OK and (reason := fault_of_outputs(nbformat.read(partial, as_version=4), notebook.name)):
        status, error = FAILED, reason
    record = Record(
        notebook=notebook.name,
        profile=profile,
        parameters=plan.values,
        status=status,
        error=error,
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - clock, 1),
        source_digest=notebook.digest,
    )
    _file(record, partial, running)
    return record


def fault_of_outputs(executed: NotebookNode, name: str) -> str | None:
    """Why an executed notebook is not complete, in one line; None where it is."""
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                return f"cell {number}: {output.ename}: {_first_line(output.evalue)}"
    if not code or "complete" not in code[-1].metadata.get("tags", []):
        return "its last code cell is not tagged `complete`"
    printed = "".join(
        output.text for output in code[-1].outputs if output.output_type == "stream" and output.name == "stdout"
    )
    if f"complete: {name}" not in printed.splitlines():
        return f"its last cell did not print `complete: {name}`"
    return None


def fault_of_run(notebook: Notebook, folder: Path) -> str | None:
    """Why the run kept in `folder` may not be published, in one line that says what to do; None where it may."""
    name = notebook.name
    again = f"run `dglab run {name} --profile {folder.name}`"
    if any(folder.glob(f"{name}.*.partial.ipynb")):
        return f"{name}: its latest run has not ended (or was killed); wait for it, or {again}"
    if (failed := folder / f"{name}.failed.json").exists():
        kept = failed.with_suffix(".ipynb")
        return f"{name}: its latest run failed ({Record.load(failed).error}); see {kept}, then {again}"
    path, record_path = folder / f"{name}.ipynb", folder / f"{name}.json"
    if not path.exists() or not record_path.exists():
        return f"{name}: not run with the profile {folder.name!r}; {again}"
    if Record.load(record_path).source_digest != notebook.digest:
        return f"{name}: its run is older than the notebook; {again}"
    try:
        reason = fault_of_outputs(nbformat.read(path, as_version=4), name)
    except Exception as error:  # whatever nbformat says of a damaged file
        reason = f"{path} cannot be read ({_first_line(str(error))})"
    return f"{name}: {reason}; {again}" if reason else None


def summary(records: Sequence[Record], folder: Path) -> str:
    """The table shown when all is done, one line a notebook."""
    width = max(len(record.notebook) for record in records)
    lines = [
        f"{record.notebook:<{width}}  {record.status:<11}  {record.seconds:>8.1f} s  {_outcome(record, folder)}"
        for record in records
    ]
    done = sum(record.status == OK for record in records)
    return "\n".join([*lines, f"{done} of {len(records)} notebooks complete"])


class ThisPython(AsyncKernelManager):
    """Starts kernels with the interpreter that runs this process, whatever kernelspecs a user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            # A kernel logs on this process's stderr, across the progress bar: that its loopback sockets are not
            # encrypted, and how Ctrl-C found it. What a cell raises comes back as its output.
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=50"],
            display_name="Python 3",
            language="python",
        )


class _RunningCell:
    """Which code cell is running, told by nbclient's hooks; shown on the progress bar."""

    def __init__(self, notebook: str, cells: int, progress: tqdm | None) -> None:
        self.notebook, self.cells, self.progress = notebook, cells, progress
        self.number = 0  # counted as a reader does: code cells, from 1, papermill's own pasted cell included
        self.index = 0  # among all cells

    def starts(self, cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self.number, self.index = self.number + 1, cell_index
        if self.progress is not None:
            self.progress.set_description(f"{self.notebook} cell {self.number}/{self.cells}")

    def ends(self, cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type == "code" and self.progress is not None:
            self.progress.update(1)


def _file(record: Record, partial: Path, running: _RunningCell) -> None:
    """Gives the attempt its final name, and its record."""
    folder, name = partial.parent, record.notebook
    failed, failed_record = folder / f"{name}.failed.ipynb", folder / f"{name}.failed.json"
    if record.status == OK:
        # The record goes last: a run without a record does not count.
        (folder / f"{name}.json").unlink(missing_ok=True)
        os.replace(partial, folder / f"{name}.ipynb")
        record.save(folder / f"{name}.json")
        failed.unlink(missing_ok=True)
        failed_record.unlink(missing_ok=True)
        for other in folder.glob(f"{name}.*.partial.ipynb"):
            if not _is_alive(int(other.name.split(".")[-3])):
                other.unlink(missing_ok=True)
        return
    record.save(failed_record)
    if partial.exists():
        _keep_reason(partial, record, running)
        os.replace(partial, failed)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True


def _keep_reason(partial: Path, record: Record, running: _RunningCell) -> None:
    """Writes the reason into the cell that ran, and takes back the "completed" that papermill wrote behind it."""
    executed = nbformat.read(partial, as_version=4)
    if any(output.output_type == "error" for cell in executed.cells for output in cell.get("outputs", [])):
        return
    for cell in executed.cells[running.index :]:
        cell.metadata.setdefault("papermill", {})["status"] = "pending"
    if running.number:
        cell = executed.cells[running.index]
        cell.metadata.papermill["status"] = "failed"
        cell.outputs.append(
            nbformat.v4.new_output("error", ename=record.status, evalue=record.error, traceback=[record.error])
        )
    nbformat.write(executed, partial)


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """A second Ctrl-C while the kernel shuts down must not leave it running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _code_cells(notebook: Notebook) -> int:
    """Code cells that will run, the one that papermill pastes included."""
    cells = json.loads(notebook.path.read_text(encoding="utf-8"))["cells"]
    return sum(cell["cell_type"] == "code" for cell in cells) + bool(notebook.parameters)


def _line(record: Record) -> str:
    return f"{record.notebook}: {record.status} after {record.seconds:.1f} s" + (
        f" ({record.error})" if record.error else ""
    )


def _outcome(record: Record, folder: Path) -> str:
    return (
        str(folder / f"{record.notebook}.ipynb")
        if record.status == OK
        else f"{record.error}; see {folder / record.notebook}.failed.ipynb"
    )


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else ""
