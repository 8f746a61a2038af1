"""Training nano: what a step sees, what it computes, and that a killed run goes on to the same weights."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from dglab_utils.errors import LabError
from dglab_utils.models import load
from dglab_utils.models import nano_training as training
from dglab_utils.models.nano import BOS_ID, CANVAS, EOS_ID, NANO, PAD_ID, VOCABULARY, build_nano
from dglab_utils.models.nano_tasks import TASKS, task_of
from dglab_utils.models.nano_training import CYCLE, IGNORED, Recipe, batch_at, held_out_examples, losses, train

SMALL = Recipe(steps=6, rows=4, warmup=2, threads=1, only=("copy",))


def text(tokens):
    return "".join(VOCABULARY[token] for token in tokens.tolist() if token not in (PAD_ID, BOS_ID))


@pytest.mark.parametrize("step", range(len(CYCLE)))
def test_a_batch_is_training_examples_noised(step):
    """Prompt and answer belong together, no example is held out, and the noise replaces about half of the canvas."""
    kind = CYCLE[step]
    batch = batch_at(Recipe(rows=32), step)
    replaced = (batch.noised != batch.canvas).float().mean()
    assert 0.35 < replaced < 0.65  # mean of t, less what a draw left as it was
    assert torch.equal(batch.tokens[:, kind.prompt :], batch.canvas[:, : kind.answer])
    assert torch.equal(batch.labels.masked_fill(batch.labels == IGNORED, PAD_ID), batch.tokens[:, kind.prompt :])
    for tokens, mask, canvas in zip(batch.tokens, batch.mask, batch.canvas, strict=True):
        assert mask.tolist() == [t != PAD_ID for t in tokens[: kind.prompt].tolist()] + [True] * kind.answer
        prompt, end, first = text(tokens[: kind.prompt]).partition("=")
        answer = first + text(canvas)
        if "<eos>" in answer:
            answer = answer.removesuffix("<eos>")
            assert task_of(prompt + end).accepts(prompt + end, answer)
        else:  # the first of two canvases
            assert len(answer) == CANVAS and "double" in prompt
        assert not TASKS[prompt.split()[0]].is_held_out(prompt.split()[1], answer)


def test_a_step_is_the_same_whenever_it_is_asked_for():
    first, again, other = (batch_at(Recipe(seed=s), 5) for s in (0, 0, 1))
    assert all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("tokens", "noised", "conditioned"))
    assert not torch.equal(first.noised, other.noised)


@pytest.fixture
def model():
    built = build_nano().train()
    built.set_experts_implementation("every_expert")
    return built


def test_every_expert_is_the_official_sum(model):
    batch = batch_at(SMALL, 0)
    ours = losses(model, batch)
    sum(ours).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_experts_implementation("eager")
    theirs = losses(model, batch)
    sum(theirs).backward()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[name], p.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_everything_but_the_eyes_is_trained(model, precision):
    """With autocast too, where a pass without gradient must not leave its casts to the next."""
    autocast = (lambda: torch.autocast("cpu", precision)) if precision else training.nullcontext
    sum(losses(model, batch_at(SMALL, 0), autocast)).backward()
    still = [n for n, p in model.named_parameters() if (p.grad is None or not p.grad.any()) and "vision" not in n]
    assert still == []


def test_the_decoder_does_not_see_the_answer(model):
    """Another clean answer in the encoder's columns moves the causal loss, and not the canvas's."""
    batch = batch_at(SMALL, 0)
    columns = batch.tokens.shape[1] - batch.labels.shape[1]
    other = batch.tokens.clone()
    other[:, columns:] = torch.randint(3, NANO.vocab, other[:, columns:].shape)
    with torch.no_grad():
        told, untold = losses(model, batch), losses(model, replace(batch, tokens=other))
    torch.testing.assert_close(told[0], untold[0])
    assert (told[1] - untold[1]).abs() > 1e-3


def test_the_causal_loss_is_that_of_the_next_token(model):
    """Against the encoder read a column at a time."""
    batch = batch_at(SMALL, 0)
    columns = batch.tokens.shape[1] - batch.labels.shape[1]
    with torch.no_grad():
        hidden = model.model.encoder(input_ids=batch.tokens, attention_mask=batch.mask).last_hidden_state
        logits = 30 * torch.tanh(model.lm_head(hidden) / 30)
        told = [
            -logits[row, at - 1].log_softmax(-1)[batch.tokens[row, at]]
            for row in range(len(batch.tokens))
            for at in range(columns, batch.tokens.shape[1])
            if batch.tokens[row, at] != PAD_ID
        ]
        torch.testing.assert_close(losses(model, batch)[1], torch.stack(told).mean(), atol=1e-4, rtol=1e-4)


# -- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("training") / "whole"
    train(folder, SMALL, device="cpu", checkpoint_every=2, report_every=2, evaluate_every=10)
    return folder


def test_a_run_leaves_checkpoints_log_and_recipe(whole):
    assert {"final", "young", "state", "log.jsonl", "recipe.json"} == {p.name for p in whole.iterdir()}
    lines = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert set(lines[-1]["held_out"]) == {"copy"}
    assert lines[1]["learning_rate"] > lines[2]["learning_rate"]
    young, final = (load_file(whole / name / "model.safetensors") for name in ("young", "final"))
    assert any(not torch.equal(young[name], final[name]) for name in final)
    assert load(whole / "final").generation_config.eos_token_id == EOS_ID
    with pytest.raises(LabError, match="this training is complete"):
        train(whole, SMALL, device="cpu")


KILLED = """
import os, signal, sys
from pathlib import Path
from dglab_utils.models.nano_training import Recipe, train
def kill(step, told):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
recipe = Recipe(steps=6, rows=4, warmup=2, threads=1, only=("copy",))
train(Path(sys.argv[1]), recipe, device="cpu", checkpoint_every=2, report_every=2, evaluate_every=10, each_step=kill)
"""


def test_a_killed_run_goes_on_to_the_same_weights(whole, tmp_path):
    """Killed after step 5, whose state was last kept at 4: step 5 is done again, and nothing differs at the end."""
    folder = tmp_path / "killed"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], timeout=240, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    assert (folder / "state" / "step").read_text() == "4\n" and not (folder / "final").exists()
    train(folder, SMALL, device="cpu", checkpoint_every=2, report_every=2, evaluate_every=10)
    theirs, ours = (load_file(run / "final" / "model.safetensors") for run in (whole, folder))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6]


def test_prompts_that_are_tested_are_different_where_there_are_that_many():
    """Of one digit there is one held-out number; of two letters and more there are plenty; a length has one prompt."""
    for task, distinct in (("say", {1: 1, 3: 20}), ("copy", {4: 20}), ("brackets", {8: 1})):
        found = held_out_examples(20, seed="a", tasks=[task])
        for level, count in distinct.items():
            prompts = [e.prompt for e in found if e.level == level]
            assert len(set(prompts)) == count
            assert len(prompts) == (20 if task == "brackets" else count)
    assert found == held_out_examples(20, seed="a", tasks=[task])


def test_other_settings_do_not_resume(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    with pytest.raises(LabError, match=r"holds a run of another recipe: learning_rate is 0\.0015 there, 0\.001 asked"):
        train(whole, replace(SMALL, learning_rate=1e-3), device="cpu")
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("*")}


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("two years of work")
    with pytest.raises(LabError, match="not a training run"):
        train(tmp_path, SMALL, device="cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_damaged_state_is_named(whole, tmp_path):
    folder = tmp_path / "damaged"
    (folder / "state").mkdir(parents=True)
    (folder / "recipe.json").write_text((whole / "recipe.json").read_text())
    for path in (whole / "state").iterdir():
        if path.is_file():
            (folder / "state" / path.name).write_bytes(path.read_bytes()[:100])
    with pytest.raises(LabError, match="state: damaged"):
        train(folder, SMALL, device="cpu")
    assert not (folder / "final").exists()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"steps": 0}, "steps 0"),
        ({"rows": 1}, "rows 1"),
        ({"precision": "int8"}, "precision 'int8'"),
        ({"only": ("multiply",)}, "no task 'multiply'"),
    ],
)
def test_an_impossible_recipe_is_refused(asked, told):
    with pytest.raises(LabError, match=told):
        Recipe(**asked)


def test_a_device_that_is_not_here_is_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(LabError, match="not on this machine"):
        train(tmp_path / "run", SMALL, device="cuda")
