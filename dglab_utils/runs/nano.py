"""`dglab train-nano` and `dglab test-nano`: train the small model, and say how good it is on what it never saw.

A checkpoint's card (`README.md` beside the weights) is written from its recipe, its log and the table that `test-nano`
prints, so that it holds no number that was typed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from tqdm.auto import tqdm
from transformers import DiffusionGemmaForBlockDiffusion

from dglab_utils.engines.masked_diffusion import MaskedCanvas, MaskedDiffusion
from dglab_utils.errors import LabError
from dglab_utils.measure.answers import (
    OPEN_TEMPERATURE,
    Answer,
    Share,
    a_token_at_a_time,
    by_diffusion,
    forwards_of,
    repeated,
    share_of,
    variety,
)
from dglab_utils.models.loading import TRAINED, load
from dglab_utils.models.nano import CANVAS, MASK_ID, check_is_nano, tokenizer
from dglab_utils.models.nano_tasks import TASKS, Example, task_called
from dglab_utils.models.nano_training import (
    FINAL,
    LOG,
    RECIPE,
    YOUNG,
    YOUNG_SHARE,
    Recipe,
    held_out_examples,
    train,
    young_at,
)
from dglab_utils.paths import ROOT, written

THRESHOLD = 0.9  # of a masked model's probabilities; Fast-dLLM's choice (arXiv 2505.22618)
HEADINGS = ("task", "level", "prompts", "right", "95 % interval", "steps", "one at a time", "distinct")


def train_nano(folder: Path, recipe: Recipe, device: str | None) -> None:
    """Trains with a progress bar, and says where the checkpoints are."""
    with tqdm(total=recipe.steps, desc="training", unit="step") as bar:

        def told(step: int, figures: dict[str, float]) -> None:
            bar.update(step - bar.n)
            if figures:
                bar.set_postfix(canvas=f"{figures['canvas_loss']:.3f}", causal=f"{figures['causal_loss']:.3f}")

        masked = recipe.objective == "masked"
        model = train(folder, recipe, device=device, each_step=told, evaluate=masked_accuracy if masked else None)
    shown = [e for e in held_out_examples(1, seed="shown", tasks=recipe.only or tuple(TASKS)) if len(e.answer) < CANVAS]
    for answer in by_diffusion(model, shown[:3]) if not masked else ():
        print(f"asked {answer.example.prompt} says {answer.text!r} in {answer.forwards} steps")
    print(f"trained: {folder / FINAL}; after {YOUNG_SHARE:.0%} of it: {folder / YOUNG}; curves: {folder / LOG}")


def by_masks(model: DiffusionGemmaForBlockDiffusion, examples: Sequence[Example]) -> list[Answer]:
    """Answers of a model trained with masks, in the order of the examples: a canvas as one block, cached, and each step
    writes what is likely by THRESHOLD. Nothing is drawn.
    """
    check_is_nano(model)
    engine = MaskedDiffusion(MaskedCanvas(model, MASK_ID), tokenizer(), block=CANVAS, threshold=THRESHOLD, cached=True)
    found = []
    for example in examples:
        told = engine.generate(example.prompt, max_new_tokens=2 * CANVAS)
        right = told.ended and TASKS[example.task].accepts(example.prompt, told.text)
        found.append(Answer(example, told.text, right, told.forwards, told.tokens))
    return found


def masked_accuracy(model: DiffusionGemmaForBlockDiffusion, examples: Sequence[Example]) -> dict[str, float]:
    """Share of right answers by task of a model that is trained with masks; it may be in training."""
    was_training = model.training
    model.eval()
    right: dict[str, list[bool]] = {}
    for answer in by_masks(model, examples):
        right.setdefault(answer.example.task, []).append(answer.right)
    model.train(was_training)
    return {task: sum(told) / len(told) for task, told in right.items()}


def _is_masked(folder: Path) -> bool:
    """Whether the checkpoint in this folder was trained with masks, by its recipe; without one it was not."""
    try:
        return _training_of(folder)[0].get("objective") == "masked"
    except LabError:
        return False


def test_nano(source: str, *, a_level: int, seed: int, tasks: Sequence[str]) -> list[tuple[str, ...]]:
    """Held-out accuracy of a checkpoint by task and level: rows under HEADINGS.

    By the official `generate()` at its default settings; one that was trained with masks, by `by_masks`.
    """
    asked = [task_called(name) for name in tasks or TASKS]
    model, rows = load(source), []
    masked = _is_masked(Path(TRAINED.get(source, source)))
    for task in tqdm(asked, desc="tasks"):
        name = task.name
        examples = held_out_examples(a_level, seed=f"test {seed}", tasks=[name])
        diffusion = by_masks(model, examples) if masked else by_diffusion(model, examples, seed=seed)
        temperature = 0.0 if task.closed else OPEN_TEMPERATURE
        causal = a_token_at_a_time(model, examples, temperature=temperature, seed=seed)
        same = diffusion
        again = [] if masked else repeated(a_level, seed=f"test {seed}", tasks=[name])
        if again and [e.prompt for e in again] != [e.prompt for e in examples]:
            same = by_diffusion(model, again, seed=seed)
        for level in task.shown:
            distinct = _distinct(_of(same, level)) if again else ""
            rows.append((*_row(name, str(level), _of(diffusion, level), _of(causal, level)), distinct))
        rows.append((*_row(name, "all", diffusion, causal), ""))
    return rows


def _distinct(told: list[Answer]) -> str:
    found = variety(told)
    return f"{found.distinct} of {found.draws} (even draws: {found.even:.0f})"


def _of(told: list[Answer], level: int) -> list[Answer]:
    return [answer for answer in told if answer.example.level == level]


def _row(name: str, level: str, diffusion: list[Answer], causal: list[Answer]) -> tuple[str, ...]:
    right, other = _share(diffusion), _share(causal)
    steps = forwards_of(diffusion).mean()
    return (
        name,
        level,
        str(right.count),
        f"{right.share:.1%}",
        f"{right.low:.1%} to {right.high:.1%}",
        f"{steps:.1f}",
        f"{other.share:.1%}",
    )


def _share(told: list[Answer]) -> Share:
    return share_of(answer.right for answer in told)


def as_text(rows: list[tuple[str, ...]]) -> str:
    """The rows as a Markdown table with aligned columns."""
    lines = [HEADINGS, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    told = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([told[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *told[1:]])


# Templates of string.Template: of a checkpoint for `generate()`, and of one that was trained with masks.
CARD, MASKED_CARD = (Path(__file__).with_name(name) for name in ("nano_card.md", "nano_masked_card.md"))


def _training_of(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(recipe, log) of a checkpoint. Raises LabError where it has none."""
    try:
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        log = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        raise LabError(
            f"{folder}: no card without {RECIPE} and {LOG} of its training; train-nano leaves them"
        ) from None
    return recipe, log


def card(folder: Path, table: str, command: str) -> Path:
    """Writes `README.md` of a checkpoint from its recipe, its log and a table of held-out accuracy.

    Args:
        command: what prints the table again.
    """
    recipe, log = _training_of(folder)
    last = log[-1]
    shown = [line for line in log if line["step"] % max(1, last["step"] // 8) < 50] or log
    curves = [f"| {line['step']} | {line['canvas_loss']:.3f} | {line['causal_loss']:.3f} |" for line in shown]
    told = [line for line in log if "held_out" in line]
    told = [line for i, line in enumerate(told) if not (len(told) - 1 - i) % max(1, len(told) // 8)]  # and the last
    names = list(told[-1]["held_out"]) if told else []
    rights = [["step", *names], ["---"] * (1 + len(names))]
    rights += [[str(line["step"]), *(f"{share:.0%}" for share in line["held_out"].values())] for line in told]
    template = MASKED_CARD if recipe.get("objective") == "masked" else CARD
    text = Template(template.read_text(encoding="utf-8")).substitute(
        threshold=THRESHOLD,
        name=_name(folder),
        weights=f"{sum(p.numel() for p in load(str(folder)).parameters()):,}",
        command=command,
        temperature=OPEN_TEMPERATURE,
        tasks=", ".join(recipe["only"] or TASKS),
        # The log has a line every so many steps, and the young checkpoint may lie between two.
        steps=recipe["steps"] if last["step"] == recipe["steps"] else young_at(min(recipe["first"], recipe["steps"])),
        all_steps=recipe["steps"],
        rows=recipe["rows"],
        minutes=round(last["seconds"] / 60),
        threads=recipe["threads"],
        seed=recipe["seed"],
        curves="\n".join(["| step | canvas | causal |", "|---|---|---|", *curves]),
        rights="\n".join(f"| {' | '.join(row)} |" for row in rights),
        table=table,
    )
    with written(folder / "README.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return folder / "README.md"


def _name(folder: Path) -> str:
    """What `load` calls the checkpoint in this folder; the folder's own name where it is none of the repository's."""
    return next((name for name, path in TRAINED.items() if path.resolve() == folder.resolve()), folder.name)


def test_and_tell(source: str, *, a_level: int, seed: int, tasks: Sequence[str], with_card: bool) -> None:
    """Prints the table, and writes it into the checkpoint's card where that is asked."""
    folder = Path(TRAINED.get(source, source))
    if with_card:
        _training_of(folder)  # before minutes of work
        if tasks:
            raise LabError("test-nano: a card tells of all tasks; leave --task out")
    table = as_text(test_nano(source, a_level=a_level, seed=seed, tasks=tasks))
    print(table)
    if with_card:
        written_to = card(folder, table, f"dglab test-nano {_name(folder)} --a-level {a_level} --seed {seed}")
        print("written:", written_to.relative_to(ROOT) if written_to.is_relative_to(ROOT) else written_to)
