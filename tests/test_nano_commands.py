"""`dglab train-nano` and `test-nano`, and the checkpoints that the repository holds."""

from __future__ import annotations

import json
import re

import pytest

from dglab_utils.models import load
from dglab_utils.models.loading import TRAINED
from dglab_utils.models.nano_tasks import TASKS
from dglab_utils.models.nano_training import Recipe, train, young_at
from dglab_utils.runs import cli, nano

TWO_STEPS = ["--demo", "--steps", "2", "--rows", "2", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nano") / "run"
    assert cli.main(["train-nano", str(folder), *TWO_STEPS]) == 0
    return folder


def test_a_trained_folder_is_tested_and_gets_its_card(run, capsys):
    final = run / "final"
    assert cli.main(["test-nano", str(final), "--a-level", "1", "--card"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| all ") == len(TASKS)
    card = (final / "README.md").read_text()
    assert printed.partition("\nwritten:")[0] in card
    assert "2 of 2 steps of 2 examples" in card and "$" not in card
    assert f"{sum(p.numel() for p in load(final).parameters()):,} weights" in card


def test_a_twin_with_masks_is_tested_by_masks(tmp_path):
    recipe = Recipe(steps=2, first=2, rows=2, warmup=1, threads=1, objective="masked", only=("copy",))
    train(tmp_path / "run", recipe, device="cpu", evaluate=lambda model, examples: {"copy": 0.0})
    final = tmp_path / "run" / "final"
    rows = nano.test_nano(str(final), a_level=1, seed=0, tasks=["copy"])
    assert len(rows) == 1 + len(TASKS["copy"].shown)
    # Two steps teach nothing: no position is likely by 0.9, and each forward writes one of two canvases.
    assert all((row[3], row[5], row[7]) == ("0.0%", "128.0", "") for row in rows[:-1])
    card = nano.card(final, nano.as_text(rows), "dglab test-nano run").read_text()
    assert "--objective masked" in card and "trained with masks" in card and "$" not in card
    assert nano.as_text(rows) in card


def test_a_table_comes_out_equal_again(run):
    """Prompts and noise come from the seed alone."""
    first, again = (nano.test_nano(str(run / "final"), a_level=2, seed=0, tasks=["copy"]) for _ in range(2))
    assert first == again and len(first) == 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["test-nano", "nano", "--task", "multiply"], "no task 'multiply'"),
        (["test-nano", "nano", "--task", "copy", "--card"], "a card tells of all tasks"),
        (["test-nano", "toy-1m", "--task", "copy"], "toy-1m@0: not a nano"),
        (["train-nano", "RUN/recipe.json", *TWO_STEPS], "a file; give a folder"),
        (["train-nano", "RUN", "--learning-rate", "-1"], "learning rate -1"),
        (["train-nano", "RUN", "--seed", "4294967296"], "seed 4294967296"),
        (["train-nano", "RUN", *TWO_STEPS[:-1], "cuda:3"], "cuda:3"),
        (["test-nano", "no/such/folder/at/all"], "no/such/folder"),
        (["train-nano", "RUN", "--demo", "--steps", "0"], "steps 0"),
        (["train-nano", "RUN", *TWO_STEPS], "this training is complete"),
        (["train-nano", "RUN", *TWO_STEPS, "--seed", "5"], "holds a run of another recipe: seed is 0 there, 5 asked"),
        (["train-nano", "RUN", *TWO_STEPS[:-1], "tpu"], "tpu"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, told):
    before = sorted(p.stat().st_mtime_ns for p in run.rglob("*"))
    assert cli.main([a.replace("RUN", str(run)) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert [line for line in error.splitlines() if line.startswith("dglab:")] == error.splitlines()[-1:]
    assert before == sorted(p.stat().st_mtime_ns for p in run.rglob("*"))


@pytest.mark.parametrize("name", TRAINED)
def test_a_shipped_checkpoint_prints_its_card_again(name):
    """Two tasks of the card, by the command that wrote it; the whole table takes minutes.

    Another CPU may round a logit the other way and accept another character once: shares may differ by two prompts
    a level, steps by a tenth.
    """
    card = (TRAINED[name] / "README.md").read_text()
    a_level, seed = map(int, re.search(rf"dglab test-nano {name} --a-level (\d+) --seed (\d+)", card).groups())
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]
    there = {tuple(cells[:2]): cells for cells in lines}
    for task in ("copy", "brackets"):
        rows = nano.test_nano(name, a_level=a_level, seed=seed, tasks=[task])
        assert len(rows) == 1 + len(TASKS[task].shown)
        for row in rows:
            told = there[row[:2]]
            assert told[2] == row[2]
            near = 100 * 2 / a_level
            for column in (3, 6):
                assert abs(float(told[column].rstrip("%")) - float(row[column].rstrip("%"))) <= near
            assert float(told[5]) == pytest.approx(float(row[5]), rel=0.1)


@pytest.mark.parametrize("name", TRAINED)
def test_a_shipped_checkpoint_is_small_and_tells_its_recipe(name):
    folder = TRAINED[name]
    assert (folder / "model.safetensors").stat().st_size <= 16e6
    recipe = json.loads((folder / "recipe.json").read_text())
    told = {key: tuple(value) if isinstance(value, list) else value for key, value in recipe.items()}
    objective = "masked" if name == "nano-masked" else "uniform"
    assert Recipe(**told) == Recipe(objective=objective), "made by the command as it is"
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    if name != "nano-young":
        assert steps[-1] == recipe["steps"]
    else:
        assert steps[-1] <= young_at(min(recipe["first"], recipe["steps"])) < steps[-1] + 50  # a line every fifty steps
    words = " ".join((folder / "README.md").read_text().split())  # a line may end between two of them
    assert f"{recipe['steps']} steps of {recipe['rows']} examples" in words
    assert load(name).name_or_path == name
