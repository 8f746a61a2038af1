"""The typed parameters cell: what is read from it, what is refused, and that each notebook has a good one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from small_notebooks import write_notebook

from dglab_utils.errors import LabError
from dglab_utils.paths import NOTEBOOKS
from dglab_utils.runs.catalogue import read_notebook
from dglab_utils.runs.parameters import checked, parameters_in, validated, with_values

CELL = """\
# a line of its own is not a parameter's comment
seeds: int = 16                    # how many seeds, from 0 [1..1000]
device: str = "cpu"                # where the model runs [cpu | cuda | mps]
growths: list[float] = [0.5, 1.0]  # growth of the ramp, logits a step [> 0]
steps: list[int] = []              # steps to show [0..48, may be empty]
limit: int | None = None           # stop after so many [>= 1]
keep: bool = False                 # keep the logits
bound: float = 0.1                 # entropy bound, nats [> 0, <= 10]
width: int = 8                     # experts [4 | 8 | 128]
label: str = "naïve"               # name on the figures
prompts: list[str] = [
    "a # b",
    "c",
]  # texts
"""


def test_the_cell_is_read_as_written():
    found = {p.name: p for p in parameters_in(CELL, "n")}
    assert list(found) == ["seeds", "device", "growths", "steps", "limit", "keep", "bound", "width", "label", "prompts"]
    assert (found["seeds"].comment, found["seeds"].allowed, found["seeds"].default) == (
        "how many seeds, from 0",
        "1..1000",
        16,
    )
    assert found["limit"].optional and not found["limit"].is_list and found["limit"].scalar is int
    assert found["prompts"].comment == "texts" and found["prompts"].default == ["a # b", "c"]
    assert found["keep"].expected == "bool" and found["device"].expected == "str, cpu | cuda | mps"


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("seeds", 1000, 1000),
        ("bound", 1, 1.0),
        ("growths", [1, 2.5], [1.0, 2.5]),
        ("growths", (3,), [3.0]),
        ("steps", [], []),
        ("limit", None, None),
        ("limit", 3, 3),
        ("keep", True, True),
        ("width", 128, 128),
        ("device", "mps", "mps"),
    ],
)
def test_good_values_come_back_typed(name, given, value):
    result = validated("n", parameters_in(CELL, "n"), {name: given})[name]
    assert result == value and type(result) is type(value)
    if isinstance(value, list):
        assert [type(x) for x in result] == [type(x) for x in value]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("seeds", 0, "seeds = 0 is out of bounds; allowed: int, 1..1000"),
        ("seeds", True, "seeds = True has the wrong type"),
        ("seeds", 2.0, "seeds = 2.0 has the wrong type"),
        ("seeds", "2", "wrong type"),
        ("seeds", None, "wrong type"),
        ("seeds", [1], "wrong type"),
        ("device", "tpu", "device = 'tpu' is out of bounds; allowed: str, cpu | cuda | mps"),
        ("growths", [], "is an empty list"),
        ("growths", [1.0, 0.0], "holds 0.0, which is out of bounds"),
        ("growths", [1.0, "x"], "holds 'x', which is not float"),
        ("growths", 1.0, "is not a list, write [1.0]"),
        ("steps", [49], "holds 49"),
        ("limit", 0, "out of bounds"),
        ("keep", 1, "wrong type"),
        ("bound", float("nan"), "is not finite"),
        ("bound", float("inf"), "is not finite"),
        ("bound", False, "wrong type"),
        ("bound", 10.5, "out of bounds"),
        ("width", 16, "out of bounds"),
        ("sede", 3, "no parameter 'sede'; did you mean 'seeds'?"),
    ],
)
def test_bad_values_are_one_line_that_names_them(name, given, says):
    with pytest.raises(LabError) as caught:
        validated("03_note", parameters_in(CELL, "03_note"), {name: given})
    message = str(caught.value)
    assert message.startswith("03_note: ") and says in message and "\n" not in message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("a: int = 1", "parameter a has no comment"),
        ("a: int = 1  # [0..3]", "parameter a has no comment"),
        ("a = 1  # x", "only `name: type = literal`"),
        ("a: int  # x", "only `name: type = literal`"),
        ("import os", "only `name: type = literal`"),
        ("a: int = 1  # x\nb: int = a + 1  # y", "`a + 1` is no literal"),
        ("a: dict = {}  # x", "type `dict` is not one of"),
        ("a: list[list[int]] = []  # x", "is not one of"),
        ("a: int = 1.5  # x", "a = 1.5 has the wrong type"),
        ("a: int = 9  # x [1..3]", "a = 9 is out of bounds"),
        ("a: float = 1.0  # entropy [nats]", "[nats] that are no bound"),
        ("a: int = 1  # x\na: int = 2  # y", "declared twice"),
        ("a: int = (", "not Python"),
    ],
)
def test_a_bad_cell_is_refused(cell, says):
    with pytest.raises(LabError) as caught:
        parameters_in(cell, "n")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_values_as_run_replace_the_defaults_and_nothing_else():
    values = validated(
        "n", parameters_in(CELL, "n"), {"seeds": 3, "growths": [4], "label": "ü", "prompts": ["only"], "limit": 5}
    )
    shown = with_values(CELL, values)
    again = parameters_in(shown, "n")
    assert {p.name: p.default for p in again} == values
    assert [(p.name, p.annotation, p.comment, p.allowed) for p in again] == [
        (p.name, p.annotation, p.comment, p.allowed) for p in parameters_in(CELL, "n")
    ]
    assert shown.startswith("# a line of its own") and with_values(CELL, {}) == CELL


def test_the_setup_cell_gives_values_or_the_same_line(tmp_path):
    write_notebook(tmp_path, "01_a", parameters=CELL)
    defaults = {p.name: p.default for p in parameters_in(CELL, "01_a")}
    assert checked("01_a", defaults | {"seeds": 4, "unrelated": 1}, tmp_path).seeds == 4
    with pytest.raises(LabError, match="seeds = 0 is out of bounds"):
        checked("01_a", defaults | {"seeds": 0}, tmp_path)
    with pytest.raises(LabError, match="seeds not set: run the cell tagged"):
        checked("01_a", {k: v for k, v in defaults.items() if k != "seeds"}, tmp_path)
    # What plain papermill does with `-p sede 3`: it pastes the line and goes on.
    pasted = {"In": ["", CELL, "# Parameters\nsede = 3\n"], "sede": 3}
    with pytest.raises(LabError, match="no parameter 'sede'; did you mean 'seeds'"):
        checked("01_a", defaults | pasted, tmp_path)
    with pytest.raises(LabError, match="no such notebook"):
        checked("02_b", defaults, tmp_path)


@pytest.mark.timeout(120)
def test_plain_papermill_with_a_typo_fails_in_the_setup_cell(tmp_path):
    setup = (
        "from pathlib import Path\nfrom dglab_utils.runs.parameters import checked\n"
        f"p = checked('01_a', globals(), Path({str(tmp_path)!r}))"
    )
    path = write_notebook(tmp_path, "01_a", setup)
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(path),
        str(tmp_path / "out.ipynb"),
        "-k",
        "python3",
        "-p",
        "sede",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "no parameter 'sede'; did you mean 'seeds'?" in done.stderr


def test_every_committed_notebook_has_a_good_cell():
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert paths, f"no notebook in {NOTEBOOKS}"
    for path in paths:
        notebook = read_notebook(path)
        assert notebook.parameters and notebook.question, path.name
