"""Training nano: what a step sees, what it computes, and that a killed run goes on to the same weights."""

import json
import math
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
from dglab_utils.models.nano import BOS_ID, CANVAS, EOS_ID, MASK_ID, NANO, PAD_ID, VOCABULARY, build_nano
from dglab_utils.models.nano_tasks import TASKS, task_of
from dglab_utils.models.nano_training import (
    IGNORED,
    POOL,
    WIDTHS,
    Recipe,
    batch_at,
    held_out_examples,
    losses,
    train,
)

LATE = 320 * math.prod(POOL)  # a step of the last stage, at the begin of a pool
SMALL = Recipe(steps=6, first=4, rows=4, warmup=2, threads=1, only=("copy",))


def text(tokens):
    return "".join(VOCABULARY[token] for token in tokens.tolist() if token not in (PAD_ID, BOS_ID))


@pytest.mark.parametrize("step", range(math.prod(POOL)))
def test_a_batch_is_training_examples(step):
    """Prompt and answer belong together, no example is held out, and the canvas holds answer, EOS and padding."""
    batch = batch_at(Recipe(rows=32), LATE + step)
    for tokens, asked, labels, canvas in zip(batch.tokens, batch.asked, batch.labels, batch.canvas, strict=True):
        told = labels[labels != IGNORED]
        assert torch.equal(labels[asked - 1 : asked - 1 + len(told)], told)
        assert torch.equal(tokens[asked : asked + len(told)], told) and not tokens[asked + len(told) :].any()
        assert torch.equal(canvas[: len(told)], told) and not canvas[len(told) :].any()
        assert tokens[0] == BOS_ID
        prompt, end, first = text(tokens[:asked]).partition("=")
        answer = first + text(told)
        if "<eos>" in answer:
            answer = answer.removesuffix("<eos>")
            assert task_of(prompt + end).accepts(prompt + end, answer)
        else:  # the first of two canvases
            assert len(answer) == CANVAS and "double" in prompt
        assert not TASKS[prompt.split()[0]].is_held_out(prompt.split()[1], answer)


def test_steps_of_a_pool_share_its_examples_by_length():
    """As many tokens a step, every task drawn, little padding, and canvases cut to what the answers need."""
    recipe = Recipe(rows=64, whole_canvas=0.0)
    batches = [batch_at(recipe, LATE + step) for step in range(math.prod(POOL))]
    assert sum(len(b.tokens) for b in batches) == 64 * math.prod(POOL)
    tokens = [(b.tokens != PAD_ID).sum().item() for b in batches]
    assert max(tokens) < 1.4 * min(tokens)
    assert {text(row).split()[0] for b in batches for row in b.tokens} == set(TASKS)
    assert sum(tokens) > 0.65 * sum(b.tokens.numel() for b in batches)
    for b in batches:
        width, longest = b.canvas.shape[1], (b.labels != IGNORED).sum(1).max().item()
        assert width == CANVAS or (longest < width <= longest + WIDTHS and width % WIDTHS == 0)
    assert min(b.canvas.shape[1] for b in batches) < CANVAS / 2
    assert all(batch_at(Recipe(rows=8, whole_canvas=1.0), step).canvas.shape[1] == CANVAS for step in range(4))


def test_tasks_come_in_stages():
    """In the first steps two, in the last all; where only some are trained, those from the first."""

    def tasks_at(recipe, share):
        pool = int(share * recipe.first) // math.prod(POOL) * math.prod(POOL)
        return {text(row).split()[0] for i in range(math.prod(POOL)) for row in batch_at(recipe, pool + i).tokens}

    recipe = Recipe()
    assert tasks_at(recipe, 0.0) == tasks_at(recipe, 0.035) == {"copy", "reverse"}
    assert tasks_at(recipe, 0.05) == {"copy", "reverse", "sort", "double", "palindrome", "shuffle"}
    assert tasks_at(recipe, 0.09) == tasks_at(recipe, 0.99) == tasks_at(recipe, 1.2) == set(TASKS)
    assert tasks_at(replace(recipe, only=("add",)), 0.0) == {"add"}
    assert tasks_at(replace(recipe, only=("add", "copy")), 0.0) == {"copy"}


def test_the_second_part_is_for_what_is_hard():
    """Sums are the most frequent; most examples with many right answers have few positions replaced."""
    recipe = Recipe(rows=64)
    asked, replaced = [], {True: [], False: []}
    for step in range(20):
        b = batch_at(recipe, recipe.first + step)
        for row in range(len(b.canvas)):
            task = task_of(text(b.tokens[row]).partition("=")[0] + "=")
            length = (b.labels[row] != IGNORED).sum()
            asked.append(task.name)
            replaced[task.closed].append((b.noised[row] != b.canvas[row])[:length].sum().item())
    assert max(set(asked), key=asked.count) == "sum"
    few = sum(count <= 3 for count in replaced[False]) / len(replaced[False])
    early = [batch_at(recipe, LATE + step) for step in range(20)]
    before = [
        ((b.noised[row] != b.canvas[row]) & (b.canvas[row] != PAD_ID)).sum().item() <= 3
        for b in early
        for row in range(len(b.canvas))
        if not task_of(text(b.tokens[row]).partition("=")[0] + "=").closed
    ]
    assert few > 0.7 > 0.4 > sum(before) / len(before)


def test_the_learning_rates_rise_twice(model):
    """Warm-up and cosine down to a hundredth, then up to a quarter of the peak, and down again."""
    recipe = Recipe(steps=60, first=40, warmup=4)
    for optimizer, peak in zip(training._optimizers(model, recipe), (0.02, 0.002), strict=True):
        schedule, rates = training._schedule(optimizer, recipe), []
        for _ in range(recipe.steps):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        assert rates[0] == pytest.approx(peak / 100) and max(rates) == rates[4] == pytest.approx(peak)
        assert rates[39] < peak / 50 and max(rates[40:]) == rates[42] == pytest.approx(peak / 4)
        assert rates[4:40] == sorted(rates[4:40], reverse=True) and rates[42:] == sorted(rates[42:], reverse=True)
        assert rates[-1] < peak / 50


def test_the_noise_is_that_of_the_recipe():
    """A share t of the canvas; all of it in half of the closed examples; in the pass before, more and drawn anew."""
    batches = [batch_at(Recipe(rows=64), LATE + step) for step in range(40)]
    shares = {True: [], False: []}
    kept_now, kept_before, same_noise = 0, 0, []
    for b in batches:
        for row in range(len(b.canvas)):
            now, before = b.noised[row] == b.canvas[row], b.before[row] == b.canvas[row]
            task = task_of(text(b.tokens[row]).partition("=")[0] + "=")
            shares[task.closed].append(1 - now.float().mean().item())
            kept_now, kept_before = kept_now + now.sum(), kept_before + before.sum()
            same_noise.append((b.noised[row] == b.before[row])[~now & ~before].float().mean())
    chance = 1 / NANO.vocab  # that a draw leaves a token as it was
    assert sum(shares[False]) / len(shares[False]) == pytest.approx(0.5 * (1 - chance), abs=0.04)
    assert sum(shares[True]) / len(shares[True]) == pytest.approx(0.75 * (1 - chance), abs=0.04)
    assert kept_before < kept_now
    assert torch.stack(same_noise).nanmean() == pytest.approx(chance, abs=0.01)
    temperatures = torch.cat([b.temperature.flatten() for b in batches])
    assert 0.4 <= temperatures.min() < 0.45 and 0.75 < temperatures.max() <= 0.8


def test_what_the_second_pass_keeps_is_not_drawn_anew():
    """Tokens of the answer that the first pass reads are read by the second, save where chance put them there."""
    batch = batch_at(Recipe(rows=256), LATE + 3)
    before, now = batch.before == batch.canvas, batch.noised == batch.canvas
    assert (before & ~now).float().mean() < 0.03 < (now & ~before).float().mean()


def test_a_step_is_the_same_whenever_it_is_asked_for():
    first, again, other = (batch_at(Recipe(seed=s), 5) for s in (0, 0, 1))
    assert all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("tokens", "noised", "before", "conditioned"))
    assert not torch.equal(first.noised, other.noised)


@pytest.fixture
def model():
    built = build_nano().train()
    built.set_experts_implementation("every_expert")
    return built


def test_the_losses_are_those_of_single_rows(model):
    """Each row alone, as generate() lays it out: no padding, the prompt read, then the canvas; and token by token."""
    batch = batch_at(SMALL, 0)
    batch = replace(batch, conditioned=torch.zeros_like(batch.conditioned))
    canvas, causal, answered = 0.0, 0.0, 0
    with torch.no_grad():
        for row, asked in enumerate(batch.asked.tolist()):
            prompt = batch.tokens[row : row + 1, :asked]
            cache = model.model.encoder(input_ids=prompt).cache
            logits = model(cache=cache, decoder_input_ids=batch.noised[row : row + 1]).logits
            canvas -= logits.log_softmax(-1).gather(-1, batch.canvas[row, :, None][None]).sum()
            for at in range(asked, (batch.labels[row] != IGNORED).sum() + asked):
                hidden = model.model.encoder(input_ids=batch.tokens[row : row + 1, :at]).last_hidden_state[0, -1]
                told = 30 * torch.tanh(model.lm_head(hidden) / 30)
                causal -= told.log_softmax(-1)[batch.tokens[row, at]]
                answered += 1
        ours = losses(model, batch)
    torch.testing.assert_close(ours[0], canvas / answered, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours[1], causal / answered, atol=1e-4, rtol=1e-4)


def test_the_first_pass_conditions_the_rows_that_are_meant(model):
    """Another noise before moves the loss where it is seen, and nowhere else."""
    batch = batch_at(replace(SMALL, self_conditioning=1.0), 0)
    other = replace(batch, before=torch.randint_like(batch.before, NANO.vocab))
    none = torch.zeros_like(batch.conditioned)
    with torch.no_grad():
        assert not torch.equal(losses(model, batch)[0], losses(model, other)[0])
        blind = [losses(model, replace(b, conditioned=none))[0] for b in (batch, other)]
    assert torch.equal(*blind)


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
            torch.testing.assert_close(gradients[name], p.grad, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_everything_but_the_eyes_is_trained(model, precision):
    """With autocast too, where a pass without gradient must not leave its casts to the next."""
    autocast = (lambda: torch.autocast("cpu", precision)) if precision else training.nullcontext
    sum(losses(model, batch_at(SMALL, 0), autocast)).backward()
    still = [n for n, p in model.named_parameters() if (p.grad is None or not p.grad.any()) and "vision" not in n]
    assert still == []


def test_the_decoder_does_not_see_the_answer(model):
    """Another clean answer behind the prompt moves the causal loss, and not the canvas's."""
    batch = batch_at(SMALL, 0)
    behind = torch.arange(batch.tokens.shape[1]) >= batch.asked[:, None]
    other = torch.where(behind, torch.randint(3, NANO.vocab, batch.tokens.shape), batch.tokens)
    with torch.no_grad():
        told, untold = losses(model, batch), losses(model, replace(batch, tokens=other))
    torch.testing.assert_close(told[0], untold[0])
    assert (told[1] - untold[1]).abs() > 1e-3


def test_every_weight_has_one_optimizer(model):
    """Muon the matrices that are multiplied with, AdamW all else, scales without decay."""
    muon, adam = training._optimizers(model, Recipe())
    held = [p for optimizer in (muon, adam) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert [name for name in matrices if name.endswith("layers.0.self_attn.q_proj.weight")]
    assert not [name for name in matrices if "embed" in name or "router" in name or "experts" in name]
    assert all(p.ndim <= 1 for p in adam.param_groups[1]["params"]) and adam.param_groups[1]["weight_decay"] == 0


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
    assert all(0 < line["learning_rate"] < SMALL.learning_rate for line in lines)
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
recipe = Recipe(steps=6, first=4, rows=4, warmup=2, threads=1, only=("copy",))
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
    with pytest.raises(LabError, match=r"holds a run of another recipe: learning_rate is 0\.002 there, 0\.001 asked"):
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
        ({"all_noise": 1.5}, "all_noise 1.5"),
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


def test_the_masked_twin_sees_masks_and_counts_them_alone():
    """Same examples as the other objective; only masks replace, and each counts by the inverse of its share."""
    for step in (LATE, Recipe().first + 5):
        uniform, masked = (batch_at(Recipe(objective=o), step) for o in ("uniform", "masked"))
        assert torch.equal(uniform.tokens, masked.tokens) and torch.equal(uniform.canvas, masked.canvas)
        replaced = masked.noised != masked.canvas
        assert set(masked.noised[replaced].tolist()) == {MASK_ID} and not masked.conditioned.any()
        assert torch.equal(masked.weight > 0, replaced)
        assert uniform.weight is None and uniform.conditioned.any()
        shares = [set(row[row > 0].tolist()) for row in masked.weight]
        assert all(len(share) <= 1 and min(share, default=1.0) >= 1 for share in shares)  # 1/t, one t a row


def test_an_unknown_objective_is_one_line():
    with pytest.raises(LabError, match="objective 'gauss'"):
        Recipe(objective="gauss")
