"""`dglab train-nano` and `dglab test-nano`: train the small model, and say how good it is on what it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from dglab_utils.measure.answers import Answer, Share, a_token_at_a_time, by_diffusion, forwards_of, share_of
from dglab_utils.models.loading import load
from dglab_utils.models.nano_tasks import TASKS, task_called
from dglab_utils.models.nano_training import FINAL, YOUNG, Recipe, held_out_examples, train

HEADINGS = ("task", "level", "right", "95 % interval", "steps", "one at a time")


def train_nano(folder: Path, recipe: Recipe, device: str | None) -> None:
    """Trains with a progress bar, and says where the checkpoints are."""
    with tqdm(total=recipe.steps, desc="training", unit="step") as bar:

        def told(step: int, figures: dict[str, float]) -> None:
            bar.update(step - bar.n)
            if figures:
                bar.set_postfix(canvas=f"{figures['canvas_loss']:.3f}", causal=f"{figures['causal_loss']:.3f}")

        train(folder, recipe, device=device, each_step=told)
    print(f"trained: {folder / FINAL}; after a tenth: {folder / YOUNG}; curves: {folder / 'log.jsonl'}")


def test_nano(source: str, *, a_level: int, seed: int, tasks: Sequence[str]) -> list[tuple[str, ...]]:
    """Held-out accuracy of a checkpoint by task and level, at its default settings: rows under HEADINGS."""
    asked = [task_called(name) for name in tasks or TASKS]
    model, rows = load(source), []
    for task in tqdm(asked, desc="tasks"):
        name = task.name
        examples = held_out_examples(a_level, seed=f"test {seed}", tasks=[name])
        diffusion = by_diffusion(model, examples, seed=seed)
        causal = a_token_at_a_time(model, examples, temperature=0.0 if task.closed else 1.0, seed=seed)
        for level in task.shown:
            rows.append(_row(name, str(level), _of(diffusion, level), _of(causal, level)))
        rows.append(_row(name, "all", diffusion, causal))
    return rows


def _of(told: list[Answer], level: int) -> list[Answer]:
    return [answer for answer in told if answer.example.level == level]


def _row(name: str, level: str, diffusion: list[Answer], causal: list[Answer]) -> tuple[str, ...]:
    right, other = _share(diffusion), _share(causal)
    steps = forwards_of(diffusion).mean()
    return (
        name,
        level,
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
