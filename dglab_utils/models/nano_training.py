"""Trains nano from nothing, by the recipe that is published for fine-tuning the released model.

For every example, with x the answer as a canvas of clean tokens (answer, EOS, padding):

    t ~ U(0.001, 1); every position of x is replaced with a uniformly random token with probability t
    the encoder reads the clean prompt; the decoder, which sees it through the cache, predicts x at every position
    loss = cross-entropy at every position of the canvas, not weighted by 1/t
         + mean cross-entropy of the encoder, as a causal language model, on the answer
    self-conditioning in two passes: the first without gradient, its logits given to the second in half of the examples

Source: NVIDIA NeMo AutoModel, guide "Fine-tuning DiffusionGemma" (docs.nvidia.com/nemo/automodel). What differs,
because here nothing is trained yet, because two cores are all there is, and because generate() is what comes after:

- The router is trained with everything else, and so is the padding behind the answer, without which no canvas would
  ever become confident as a whole.
- Muon trains the matrices of attention and MLPs (K. Jordan and others, 2024; `torch.optim.Muon`), AdamW the rest. With
  AdamW alone, copying begins to be learnt several times as late, in steps and in minutes.
- Copying and reversing come first, other tasks when those have begun to be learnt (`STAGES`): what they teach, to look
  up a position, takes as many examples alone as it takes among ten tasks, where few are theirs.
- A second part of the training, with learning rates that rise once more, is for what the first leaves unlearnt
  (`LATE_WEIGHTS`): sums and brackets, where one position follows from all others together. With t ~ U(0, 1) the others
  are seldom intact; here most examples with many right answers have one to three positions replaced.
- Examples of similar length share a step, and most canvases are cut behind the longest answer of their step, so that
  few of the positions that are computed are padding. The loss of the canvas is the sum over its positions, for each
  token of answer and EOS: the mean would count an answer for less the wider its canvas.
- Where one answer is right, half of the examples have t = 1: that is where generate() begins, and where it ends too,
  once a task is mastered.
- The first pass reads a noisier canvas than the second, and its logits are divided by a temperature from 0.4 to 0.8.
  So it is in generate(), where the conditioning comes from the step before: what was kept then is kept now, what was
  not is drawn anew. A pass over the same canvas would have nothing to tell that the second does not see.

`objective="masked"` trains a twin on the same examples with masks in place of random tokens (LLaDA: Nie and others,
2025, arXiv 2502.09992): cross-entropy at masked positions alone, weighted by 1/t, and no self-conditioning, which that
sampler does not know. It is for comparison; generate() cannot run it, `engines.masked_diffusion` can.

Data and noise of step s are drawn from generators seeded with (seed, s): a run that was killed goes on with exactly
what it would have seen. Accelerate places the model, chooses the precision and keeps the state; the rest of this
module is the recipe and its books.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dglab_utils.errors import LabError
from dglab_utils.models.loading import load
from dglab_utils.models.nano import CANVAS, EOS_ID, MASK_ID, NANO, PAD_ID, answers, batch_of, build_nano, tokenizer
from dglab_utils.models.nano_tasks import END, TASKS, Example
from dglab_utils.models.shapes import as_device
from dglab_utils.paths import written

NOISE_LEAST = 0.001  # of t
TEMPERATURES = 0.4, 0.8  # that generate() cools through, by default
IGNORED = -100  # label without a loss

# How often a task is drawn beside the others: by how much there is to learn.
WEIGHTS = {
    "copy": 1.0,
    "reverse": 1.0,
    "sort": 2.0,
    "double": 1.0,
    "add": 4.0,
    "say": 2.0,
    "palindrome": 2.0,
    "shuffle": 3.0,
    "sum": 3.0,
    "brackets": 1.0,
}
# Share of the first part's steps, and what they train: tasks that teach to look up a position, then what builds on it.
STAGES = (
    (0.04, ("copy", "reverse")),
    (0.08, ("copy", "reverse", "sort", "double", "palindrome", "shuffle")),
    (1.0, tuple(WEIGHTS)),
)
# The same in the second part.
LATE_WEIGHTS = {
    "copy": 0.5,
    "reverse": 0.5,
    "sort": 2.0,
    "double": 1.5,
    "add": 1.0,
    "say": 0.5,
    "palindrome": 0.5,
    "shuffle": 1.0,
    "sum": 8.0,
    "brackets": 3.0,
}
LATE_RATE = 0.25  # of the peaks of the learning rates
LATE_WARMUP = 100
LATE_FEW = 0.8  # share of the examples with many right answers in which few positions are replaced ...
LATE_REPLACED = 0.5, 3.0  # ... so many of the answer, on average
LONGER_MORE_OFTEN = ("copy", "reverse", "sort", "say", "palindrome", "shuffle", "brackets")
POOL = 4, 4  # a draw of examples is shared out to 16 steps: by answer into four parts, by length into four steps each
WIDTHS = 4  # canvases are cut to multiples of this


@dataclass(frozen=True)
class Recipe:
    """What a training run is made of; two runs with the same recipe on one CPU give the same weights.

    Attributes:
        steps: optimizer steps.
        first: of them, those of the first part; all of them where there is no second.
        rows: examples a step, on average: steps of short ones have more, of long ones fewer.
        learning_rate: peak of AdamW's, after `warmup` steps (a tenth of the part at most), before a cosine down to a
            hundredth; in the second part a quarter of it.
        matrix_learning_rate: the same of Muon's, which has the matrices of attention and MLPs.
        weight_decay, clip: of both; norm of the gradient at most.
        encoder_weight: of the causal loss.
        self_conditioning: share of the examples that see a first pass.
        all_noise: share of the examples with one right answer whose canvas is nothing but noise.
        whole_canvas: share of the steps whose canvas is not cut.
        objective: "uniform" noise, or "masked".
        precision: "no" for float32, "bf16" or "fp16" for autocast.
        only: tasks that are trained; none means all.
        seed: of weights, data and noise.
        threads: PyTorch's on a CPU; sums change their order with it, and so do the last bits.
    """

    steps: int = 17_000
    first: int = 12_000
    rows: int = 48
    learning_rate: float = 2e-3
    matrix_learning_rate: float = 0.02
    warmup: int = 200
    weight_decay: float = 0.05
    clip: float = 1.0
    encoder_weight: float = 1.0
    self_conditioning: float = 0.5
    all_noise: float = 0.5
    whole_canvas: float = 0.2
    objective: str = "uniform"
    precision: str = "no"
    only: tuple[str, ...] = ()
    seed: int = 0
    threads: int = 2

    @property
    def first_part(self) -> int:
        """Steps of the first part."""
        return min(self.first, self.steps)

    def __post_init__(self) -> None:
        if min(self.steps, self.first, self.threads) < 1 or self.rows < 2 or self.warmup < 0:
            raise LabError(
                f"training: steps {self.steps}, first {self.first}, threads {self.threads}, rows {self.rows}, "
                f"warmup {self.warmup}: want at least 1, 1, 1, 2 and 0"
            )
        if not (0 < self.learning_rate < 1 and 0 < self.matrix_learning_rate < 1 and 0 <= self.seed < 2**31):
            raise LabError(
                f"training: learning rate {self.learning_rate}, of matrices {self.matrix_learning_rate}, "
                f"seed {self.seed}: want between 0 and 1 for both, and 0 to 2**31"
            )
        for share in ("self_conditioning", "all_noise", "whole_canvas"):
            if not 0 <= getattr(self, share) <= 1:
                raise LabError(f"training: {share} {getattr(self, share)}: a share, want from 0 to 1")
        if self.objective not in ("uniform", "masked"):
            raise LabError(f"training: objective {self.objective!r}; want uniform or masked")
        if self.precision not in ("no", "bf16", "fp16"):
            raise LabError(f"training: precision {self.precision!r}; want no, bf16 or fp16")
        if unknown := [name for name in self.only if name not in TASKS]:
            raise LabError(f"training: no task {unknown[0]!r}; there are {', '.join(TASKS)}")


# Two minutes on two cores: one task is enough to see it learn.
DEMONSTRATION = Recipe(steps=380, rows=32, warmup=25, only=("copy",))


@dataclass(frozen=True)
class Batch:
    """What one step trains on. B rows, W columns that hold prompts and answers, a canvas of L positions, 64 or cut.

    Attributes:
        tokens: `[B, W]`, the clean sequence that the encoder reads: prompt, answer, EOS, padding.
        asked: `[B]`, how many of them are the prompt's: all that the decoder may see.
        labels: `[B, W]`, of the causal loss, the token that comes next in answer and EOS; IGNORED elsewhere.
        canvas: `[B, L]`, clean: answer, EOS, padding.
        noised: `[B, L]`, what the decoder reads.
        before: `[B, L]`, what its first pass reads: noisier, and other noise.
        temperature: `[B, 1, 1]`, of the first pass.
        conditioned: `[B]`, rows that see the logits of a first pass.
        weight: `[B, L]`, of each position in the canvas's loss; None where all count alike.
    """

    tokens: Tensor
    asked: Tensor
    labels: Tensor
    canvas: Tensor
    noised: Tensor
    before: Tensor
    temperature: Tensor
    conditioned: Tensor
    weight: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})


# -- data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    closed: bool
    read: tuple[int, ...]
    told: tuple[int, ...]  # in one canvas

    def __len__(self) -> int:
        return len(self.read) + len(self.told)


def batch_at(recipe: Recipe, step: int) -> Batch:
    """The batch of one step, the same whenever it is asked for."""
    pool = _pool(recipe, step // math.prod(POOL))
    rows = pool[step % len(pool)]
    noise = torch.Generator().manual_seed((recipe.seed << 32) + step)
    whole = torch.rand((), generator=noise) < recipe.whole_canvas
    answer = max(len(row.told) for row in rows)
    width = CANVAS if whole else min(CANVAS, -(-(answer + 1) // WIDTHS) * WIDTHS)
    tokens = torch.full((len(rows), max(map(len, rows))), PAD_ID)
    labels = torch.full_like(tokens, IGNORED)
    canvas = torch.full((len(rows), width), PAD_ID)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row.read + row.told)
        labels[i, len(row.read) - 1 : len(row) - 1] = torch.tensor(row.told)
        canvas[i, : len(row.told)] = torch.tensor(row.told)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=noise)

    masked = recipe.objective == "masked"

    def noised(t: Tensor) -> Tensor:
        random = torch.randint(NANO.vocab, canvas.shape, generator=noise)
        return torch.where(draw < t, MASK_ID if masked else random, canvas)

    t = NOISE_LEAST + (1 - NOISE_LEAST) * uniform(len(rows), 1)
    closed = torch.tensor([row.closed for row in rows])[:, None]
    t = torch.where(closed & (uniform(len(rows), 1) < recipe.all_noise), 1.0, t)
    if step >= recipe.first_part:
        least, most = LATE_REPLACED
        few = (least + (most - least) * uniform(len(rows), 1)) / torch.tensor([[len(row.told)] for row in rows])
        t = torch.where(~closed & (uniform(len(rows), 1) < LATE_FEW), few.clamp(max=1), t)
    draw = uniform(len(rows), width)  # one for both: what is kept before is kept now
    coolest, warmest = TEMPERATURES
    return Batch(
        tokens,
        torch.tensor([len(row.read) for row in rows]),
        labels,
        canvas,
        noised(t),
        noised(t + (1 - t) * uniform(len(rows), 1)),
        coolest + (warmest - coolest) * uniform(len(rows), 1, 1),
        (uniform(len(rows)) < recipe.self_conditioning) & (not masked),
        (draw < t) / t if masked else None,
    )


@lru_cache(maxsize=2)
def _pool(recipe: Recipe, which: int) -> list[list[_Row]]:
    """The examples of some steps, a list for each: drawn together, shared out so that little of them is padding."""
    draw = Random(f"{recipe.seed}/{which}")
    done = which * math.prod(POOL) / recipe.first_part
    now = next(names for share, names in STAGES if done < share or share == 1)
    names = tuple(name for name in now if name in recipe.only) or recipe.only or now
    weights = WEIGHTS if done < 1 else LATE_WEIGHTS
    tasks = draw.choices(names, [weights[name] for name in names], k=recipe.rows * math.prod(POOL))
    by_answer, by_length = POOL
    parts = [
        step
        for part in _shared_out([_row(draw, name) for name in tasks], by_answer, lambda row: len(row.told))
        for step in _shared_out(part, by_length, len)
    ]
    draw.shuffle(parts)
    return parts


def _shared_out(rows: Sequence[_Row], count: int, key: Callable[[_Row], int]) -> list[list[_Row]]:
    """So many parts, in the order of the key, with as many tokens each; fewer where single rows are too long."""
    parts: list[list[_Row]] = [[] for _ in range(count)]
    total, before = sum(map(len, rows)), 0
    for row in sorted(rows, key=key):
        parts[before * count // total].append(row)
        before += len(row)
    return [part for part in parts if part]


def _row(draw: Random, name: str) -> _Row:
    """An example of a task; of an answer in two canvases either."""
    task = TASKS[name]
    level = max(draw.choices(task.levels, k=2 if name in LONGER_MORE_OFTEN else 1))
    example = task.example(level, draw, held_out=False)
    read = tokenizer()(example.prompt)["input_ids"]
    told = [*tokenizer()(example.answer, add_special_tokens=False)["input_ids"], EOS_ID]
    if len(told) > CANVAS and draw.random() < 0.5:
        return _Row(task.closed, (*read, *told[:CANVAS]), tuple(told[CANVAS:]))
    return _Row(task.closed, tuple(read), tuple(told[:CANVAS]))


# -- the loss ------------------------------------------------------------------------------------------------


def losses(
    model: DiffusionGemmaForBlockDiffusion, batch: Batch, autocast: Callable = nullcontext
) -> tuple[Tensor, Tensor]:
    """(of the canvas, of the encoder as a causal language model), in nats for each token of answer and EOS.

    Each pass has an autocast of its own: within one, weights that the pass without gradient was the first to cast
    would stay without gradient in the next.
    """
    tokens, width = batch.tokens, batch.canvas.shape[1]
    with autocast():
        encoder = model.model.encoder(input_ids=tokens, cache=DynamicCache(config=model.config.text_config))
        cap = model.final_logit_softcapping
        told = cap * torch.tanh(model.lm_head(encoder.last_hidden_state).float() / cap)
    # The encoder has read the clean answer behind the prompt; the decoder stands in its place and must not see it.
    seen = torch.arange(tokens.shape[1], device=tokens.device) < batch.asked[:, None]
    seen = pad(seen, (0, width), value=True)
    at = batch.asked[:, None] + torch.arange(width, device=tokens.device)
    first = torch.zeros(*batch.canvas.shape, model.config.text_config.vocab_size, device=tokens.device)
    if len(which := batch.conditioned.nonzero().flatten()):
        with torch.no_grad(), autocast():
            conditions = model(
                cache=_rows_of(encoder.cache, which, model.config.text_config),
                decoder_input_ids=batch.before[which],
                decoder_attention_mask=seen[which],
                decoder_position_ids=at[which],
            ).logits
        first[which] = conditions.float() / batch.temperature[which]
    with autocast():
        logits = model(
            cache=encoder.cache,
            decoder_input_ids=batch.noised,
            decoder_attention_mask=seen,
            decoder_position_ids=at,
            self_conditioning_logits=first,
            self_conditioning_mask=batch.conditioned,
        ).logits
    answered = (batch.labels != IGNORED).sum()
    if batch.weight is None:
        of_canvas = cross_entropy(logits.flatten(0, 1), batch.canvas.flatten(), reduction="sum")
    else:
        of_positions = cross_entropy(logits.flatten(0, 1), batch.canvas.flatten(), reduction="none")
        of_canvas = (of_positions * batch.weight.flatten()).sum()
    return (
        of_canvas / answered,
        cross_entropy(told.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED),
    )


def _rows_of(cache: DynamicCache, which: Tensor, config: PreTrainedConfig) -> DynamicCache:
    """Some rows of a cache, without gradient."""
    part = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        part.update(layer.keys[which].detach(), layer.values[which].detach(), i)
    return part


def _every_expert(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The official experts' sum, with every expert computed for every token and those not chosen weighted with zero.

    Eight experts of 32 are then one MLP of 256 features, in two large products instead of many small ones whose sizes
    change with every batch: several times as fast on a CPU, at this size only.

    Args:
        experts: a `DiffusionGemmaTextExperts`.
        hidden: `[tokens, hidden]`.
        chosen, weights: `[tokens, k]`, the experts of a token, and how they count.
    """
    count = experts.num_experts
    share = torch.zeros(hidden.shape[0], count, dtype=weights.dtype, device=hidden.device).scatter(1, chosen, weights)
    gate, up = linear(hidden, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (count, -1)).chunk(2, dim=-1)
    inner = experts.act_fn(gate) * up * share.unsqueeze(-1).to(up.dtype)  # [tokens, experts, width]
    return linear(inner.flatten(1), experts.down_proj.transpose(0, 1).flatten(1)).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register("every_expert", _every_expert)


# -- training ------------------------------------------------------------------------------------------------

FINAL, YOUNG = "final", "young"
YOUNG_SHARE = 0.12  # of the first part, after which the young checkpoint is kept
LOG, RECIPE, STATE = "log.jsonl", "recipe.json", "state"


def young_at(steps: int) -> int:
    """The step after which the young checkpoint of so many steps is kept."""
    return max(1, round(YOUNG_SHARE * steps))


def train(
    folder: Path,
    recipe: Recipe,
    *,
    device: str | None = None,
    checkpoint_every: int = 250,
    report_every: int = 50,
    evaluate_every: int = 1000,
    evaluate: Callable[[DiffusionGemmaForBlockDiffusion, list[Example]], dict[str, float]] | None = None,
    each_step: Callable[[int, dict[str, float]], None] = lambda step, told: None,
) -> DiffusionGemmaForBlockDiffusion:
    """Trains, or goes on training, in a folder, and returns the trained model as loaded from there.

    The folder then holds `final` and `young` (checkpoints that `load` reads), `log.jsonl` (a line every `report_every`
    steps: step, losses, learning rate, seconds of training; held-out accuracy by task every `evaluate_every`),
    `recipe.json`, and `state`, from which a killed run goes on.

    Args:
        device: Accelerate's choice where None.
        evaluate: share of right answers by task, of the model in training; `accuracy` where None.
        each_step: called after each step with its number and the last figures.

    Raises:
        LabError: the folder holds a run of another recipe, or something else; a state that cannot be read; no such
            device. Nothing in the folder is changed then.
    """
    if device is not None and as_device(device).index:
        raise LabError(
            f"training: device {device}: name it without its number, and choose a card by CUDA_VISIBLE_DEVICES"
        )
    accelerator = _accelerator(recipe, device)
    began_at = _begin(folder, recipe)
    if began_at is None:
        raise LabError(f"{folder}: this training is complete; give another folder to train again")
    torch.set_num_threads(recipe.threads)
    model = build_nano(seed=recipe.seed).train()
    if accelerator.device.type == "cpu":  # the fastest there, at this size
        model.set_experts_implementation("every_expert")
        model.set_attn_implementation("eager")
    optimizers = _optimizers(model, recipe)
    schedulers = [_schedule(optimizer, recipe) for optimizer in optimizers]
    model, *prepared = accelerator.prepare(model, *optimizers, *schedulers)
    plain = accelerator.unwrap_model(model)
    if began_at:
        _resume(accelerator, folder)
    spent = _seconds_so_far(folder, began_at)
    window: list[tuple[float, float]] = []
    started = time.perf_counter()
    told: dict[str, float] = {}
    for step in range(began_at, recipe.steps):
        canvas, causal = losses(plain, batch_at(recipe, step).to(accelerator.device), accelerator.autocast)
        accelerator.backward(canvas + recipe.encoder_weight * causal)
        accelerator.clip_grad_norm_(plain.parameters(), recipe.clip)
        for part in prepared:  # optimizers, then their schedules
            part.step()
        plain.zero_grad(set_to_none=True)
        window.append((canvas.item(), causal.item()))
        done = step + 1
        if done % report_every == 0 or done == recipe.steps:
            means = [sum(values) / len(window) for values in zip(*window, strict=True)]
            told = {"canvas_loss": means[0], "causal_loss": means[1], "learning_rate": prepared[-1].get_last_lr()[0]}
            line: dict[str, Any] = {"step": done, **told, "seconds": spent + time.perf_counter() - started}
            window = []
            if done % evaluate_every == 0 or done == recipe.steps:
                tasks = recipe.only or tuple(TASKS)
                examples = held_out_examples(4, seed=f"while training {recipe.seed}", tasks=tasks)
                line["held_out"] = (evaluate or accuracy)(plain, examples)
            _append(folder / LOG, line)
        if done == young_at(recipe.first_part):
            _save_model(plain, folder / YOUNG)
        if done % checkpoint_every == 0 or done == recipe.steps:
            _save_state(accelerator, folder, done)
        each_step(done, told)
    _save_model(plain, folder / FINAL)
    return cast(DiffusionGemmaForBlockDiffusion, load(folder / FINAL, device=accelerator.device))


def _accelerator(recipe: Recipe, device: str | None) -> Accelerator:
    on_cpu = device is not None and torch.device(device).type == "cpu"
    try:
        accelerator = Accelerator(mixed_precision=recipe.precision, cpu=on_cpu)
    except ValueError as error:  # fp16 on a CPU, bf16 on a card without it
        raise LabError(f"training: precision {recipe.precision} cannot be had here: {error}") from error
    if device is not None and accelerator.device.type != torch.device(device).type:
        raise LabError(f"training: {accelerator.device.type} is taken before {device}; leave the device out")
    return accelerator


def _optimizers(model: torch.nn.Module, recipe: Recipe) -> list[Optimizer]:
    """Muon for the matrices of attention and MLPs; AdamW for embedding, router, experts (no matrices: 3D), scales."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    scales: list[Tensor] = []
    for name, p in model.named_parameters():
        kinds = matrices if p.ndim == 2 and not re.search("embed|router|vision", name) else others
        (kinds if p.ndim > 1 else scales).append(p)
    groups = [
        {"params": others, "weight_decay": recipe.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return [
        Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay),
        AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98)),
    ]


def _schedule(optimizer: Optimizer, recipe: Recipe) -> SequentialLR:
    """Warm-up and cosine; in the second part once more, lower."""
    first, second = recipe.first_part, recipe.steps - recipe.first_part
    warmup = max(1, min(recipe.warmup, first // 10))
    peak = optimizer.param_groups[0]["lr"]
    warm = LinearLR(optimizer, start_factor=1e-2, total_iters=warmup)
    after = CosineAnnealingLR(optimizer, max(1, first - warmup), eta_min=peak / 100)
    if not second:
        return SequentialLR(optimizer, [warm, after], milestones=[warmup])
    rising = max(1, min(LATE_WARMUP, second // 10))

    def late(step: int) -> float:
        """Of the peak."""
        if step < rising:
            return LATE_RATE * (step + 1) / (rising + 1)
        falling = (1 + math.cos(math.pi * (step - rising) / max(1, second - rising))) / 2
        return LATE_RATE * (0.01 + 0.99 * falling)

    return SequentialLR(optimizer, [warm, after, LambdaLR(optimizer, late)], milestones=[warmup, first])


def _begin(folder: Path, recipe: Recipe) -> int | None:
    """The step to go on from; None where all of it is done. Makes the folder where there is none."""
    told = json.loads(json.dumps(asdict(recipe)))
    if folder.exists() and not folder.is_dir():
        raise LabError(f"{folder}: a file; give a folder")
    if not folder.exists() or not any(folder.iterdir()):
        try:
            with written(folder / RECIPE) as temporary:
                temporary.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise LabError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None
        return 0
    try:
        there = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise LabError(f"{folder}: not empty, and not a training run ({RECIPE} cannot be read); give another") from None
    if there != told:
        names = sorted(name for name in told.keys() | there.keys() if told.get(name) != there.get(name))
        raise LabError(
            f"{folder}: holds a run of another recipe: {names[0]} is {there.get(names[0])!r} there, "
            f"{told.get(names[0])!r} asked; ask for the same, or give another folder"
        )
    if (folder / FINAL / "config.json").is_file():
        return None
    # Between two renames of `_save_state` only the older state is there.
    if not (folder / STATE).is_dir() and (folder / f"{STATE}.old").is_dir():
        os.rename(folder / f"{STATE}.old", folder / STATE)
    if not (folder / STATE).is_dir():
        return 0
    try:
        return int((folder / STATE / "step").read_text())
    except (OSError, ValueError):
        raise LabError(
            f"{folder / STATE}: damaged (its step cannot be read); remove the folder to start anew"
        ) from None


def _save_state(accelerator: Accelerator, folder: Path, step: int) -> None:
    fresh, there, old = folder / f"{STATE}.new", folder / STATE, folder / f"{STATE}.old"
    shutil.rmtree(fresh, ignore_errors=True)
    # Not as safetensors: those refuse tied weights, and this file is read by nobody else.
    accelerator.save_state(str(fresh), safe_serialization=False)
    (fresh / "step").write_text(f"{step}\n")
    shutil.rmtree(old, ignore_errors=True)
    if there.is_dir():
        os.rename(there, old)
    os.rename(fresh, there)
    shutil.rmtree(old, ignore_errors=True)


def _resume(accelerator: Accelerator, folder: Path) -> None:
    try:
        accelerator.load_state(str(folder / STATE))
    except Exception as error:  # a truncated pickle raises anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise LabError(f"{folder / STATE}: damaged ({reason}); remove the folder to start anew") from error


def _save_model(model: DiffusionGemmaForBlockDiffusion, folder: Path) -> None:
    """A checkpoint with its tokenizer, recipe and log so far, written beside and renamed."""
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.__wrapped__().save_pretrained(fresh)  # a used one would save its last padding too
    for name in (RECIPE, LOG):
        if (folder.parent / name).exists():
            shutil.copyfile(folder.parent / name, fresh / name)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(fresh, folder)


def _append(path: Path, line: dict[str, Any]) -> None:
    """One line more, in place of those that a killed run wrote of steps after its last state."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [old for old in lines if json.loads(old)["step"] < line["step"]]
    with written(path) as temporary:
        temporary.write_text("\n".join([*kept, json.dumps(line)]) + "\n", encoding="utf-8")


def _seconds_so_far(folder: Path, step: int) -> float:
    with suppress(OSError):
        lines = map(json.loads, (folder / LOG).read_text(encoding="utf-8").splitlines())
        return max((line["seconds"] for line in lines if line["step"] <= step), default=0.0)
    return 0.0


# -- held-out ------------------------------------------------------------------------------------------------


def held_out_examples(
    a_level: int, *, seed: str, tasks: Sequence[str] = tuple(TASKS), beyond: bool = False
) -> list[Example]:
    """So many held-out examples of every level shown of every task, the same for the same seed.

    Prompts of a level are all different, so a small level may have fewer (`say` of one digit has one). Where only a
    length is asked there is but one prompt, which training knows; what is held out there are answers, and repeats
    differ by their noise.

    Args:
        beyond: of the levels that are never trained on, too.
    """
    draw, found = Random(seed), []
    for name in tasks:
        for level in (*TASKS[name].shown, *(TASKS[name].beyond if beyond else ())):
            drawn = [TASKS[name].example(level, draw, held_out=True) for _ in range(a_level)]
            if drawn[0].prompt != f"{name} {level}{END}" or TASKS[name].closed:
                more = (TASKS[name].example(level, draw, held_out=True) for _ in range(20 * a_level))
                distinct: dict[str, Example] = {}
                for example in chain(drawn, more):
                    distinct.setdefault(example.prompt, example)
                    if len(distinct) == a_level:
                        break
                drawn = list(distinct.values())
            found += drawn
    return found


def accuracy(
    model: DiffusionGemmaForBlockDiffusion, examples: Sequence[Example], *, seed: int = 0, **settings: Any
) -> dict[str, float]:
    """Share of right answers by task, by diffusion with the official default settings.

    The global random state and the model's mode are as before afterwards.
    """
    was_training, device, attention = model.training, model.device, model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # generate() fails with the eager one where prompts are padded (5.24.0)
    right: dict[str, list[bool]] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.eval()
        # One batch for each length of answer: a batch goes on for as long as its longest row.
        for long in (False, True):
            part = [e for e in examples if (len(e.answer) >= CANVAS) == long]
            if not part:
                continue
            asked = batch_of(tokenizer(), [e.prompt for e in part], device)
            output = model.generate(**asked, **settings).sequences[:, asked["input_ids"].shape[1] :]
            for example, text in zip(part, answers(output), strict=True):
                right.setdefault(example.task, []).append(TASKS[example.task].accepts(example.prompt, text))
    model.set_attn_implementation(attention)
    model.train(was_training)
    return {task: sum(told) / len(told) for task, told in right.items()}
