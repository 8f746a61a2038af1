"""Every committed notebook passes the guard, and the guard catches each fault it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_guard import faults, is_compared, normalise

from dglab_utils.paths import NOTEBOOKS

COMMITTED = sorted(NOTEBOOKS.glob("*.ipynb"))


def test_there_are_notebooks():
    assert COMMITTED, f"no notebook in {NOTEBOOKS}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_notebook(path: Path):
    assert faults(path) == []


# -- the guard itself, on notebooks made for it --------------------------------------------------------------


def printed(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> Any:
    return new_output("display_data", data={key.replace("__", "/"): content for key, content in data.items()})


def cell(source: str, *outputs: Any, tags: tuple[str, ...] = ()) -> Any:
    return new_code_cell(
        source, outputs=list(outputs), execution_count=1, metadata={"tags": list(tags)} if tags else {}
    )


def good_cells() -> list[Any]:
    return [
        new_markdown_cell("# A question"),
        cell("seed: int = 0  # of everything", tags=("parameters",)),
        *(cell(f"print({n})", printed(f"{n}\n")) for n in range(3)),
        cell('print("complete: example")', printed("complete: example\n"), tags=("complete",)),
    ]


def write(folder: Path, cells: list[Any], metadata: dict[str, Any] | None = None) -> Path:
    path = folder / "example.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=metadata or {}), path)
    return path


def test_a_good_notebook_has_no_fault(tmp_path: Path):
    path = write(tmp_path, good_cells())
    normalise(path)
    assert faults(path) == []


def set_outputs(cells: list[Any], index: int, *outputs: Any) -> None:
    cells[index].outputs = list(outputs)


def strip(cells: list[Any]) -> None:
    for c in cells[1:-1]:
        c.outputs = []


BAD: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "error": (lambda c: c[2].outputs.append(new_output("error", ename="KeyError")), "holds an error: KeyError"),
    "long cell": (lambda c: setattr(c[2], "source", "\n".join(["x = 1"] * 41)), "has 41 lines"),
    "no parameters": (lambda c: c.pop(1), "0 code cells are tagged"),
    "two parameters": (lambda c: setattr(c[2], "metadata", {"tags": ["parameters"]}), "2 code cells are tagged"),
    "no marker": (lambda c: c.pop(), "not tagged `complete`"),
    "marker not last": (lambda c: c.append(cell("1", printed("1\n"))), "not tagged `complete`"),
    "marker without output": (lambda c: set_outputs(c, -1), "no output `complete: example`"),
    "marker of another": (lambda c: set_outputs(c, -1, printed("complete: other\n")), "no output `complete: example`"),
    "stripped": (strip, "the output of 0 code cells"),
    "too little compared": (lambda c: set_outputs(c, 2), "the output of 2 code cells"),
    "path": (lambda c: set_outputs(c, 2, printed("wrote /home/me/x.json\n")), "of this machine: /home/me/x.json"),
    "path in HTML": (lambda c: set_outputs(c, 2, shown(text__html="<i>/tmp/run/1</i>")), "of this machine: /tmp/run/1"),
    "host name": (lambda c: set_outputs(c, 2, printed("on lab-host-7\n")), "this machine's name: lab-host-7"),
    "formula": (lambda c: setattr(c[0], "source", r"# A question of $\\rho$"), "doubled backslashes"),
    "format": (lambda c: setattr(c[2], "source", "print( 0 )"), "not formatted"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_the_guard_catches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    monkeypatch.setattr("socket.gethostname", lambda: "lab-host-7")
    spoil, message = BAD[fault]
    cells = good_cells()
    spoil(cells)
    path = write(tmp_path, cells)
    normalise(path)
    found = faults(path)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(
    "metadata", [{"papermill": {"duration": 1.5}}, {"language_info": {"name": "p", "version": "3"}}]
)
def test_the_guard_catches_what_changes_with_every_run(tmp_path: Path, metadata: dict[str, Any]):
    path = write(tmp_path, good_cells(), metadata)
    assert faults(path) == ["not normalised: run `make normalise`"]
    normalise(path)
    assert faults(path) == []


def test_the_guard_catches_a_file_that_is_no_notebook(tmp_path: Path):
    path = tmp_path / "example.ipynb"
    path.write_text('{"cells": [')
    (fault,) = faults(path)
    assert fault.startswith("not a notebook")


@pytest.mark.parametrize(
    ("compared", "tested"),
    [
        (True, cell("f()", printed("1\n"))),
        (True, cell("f()", shown(text__plain="1"))),
        (True, cell("f()", shown(text__html="<b>1</b>", text__plain="<HTML>"))),
        (True, cell("f()", shown(image__png="AAAA", text__html="<b>1</b>"))),
        (True, cell("f()", printed("1\n"), tags=("nbval-check-output",))),
        (False, cell("f()")),
        (False, cell("f()", printed(" \n"))),
        (False, cell("f()", printed("a bar", name="stderr"))),
        (False, cell("f()", shown(image__png="AAAA", text__plain="<Figure>"))),
        (False, cell("f()", shown(**{"application/vnd.jupyter.widget-view+json": "x", "text__plain": "HBox()"}))),
        (False, cell("f()", printed("1\n"), tags=("nbval-ignore-output",))),
        (False, cell("f()", printed("1\n"), tags=("nbval-skip",))),
        (False, cell("# NBVAL_IGNORE_OUTPUT\nf()", printed("1\n"))),
    ],
)
def test_what_counts_as_compared(compared: bool, tested: Any):
    assert is_compared(tested) is compared
