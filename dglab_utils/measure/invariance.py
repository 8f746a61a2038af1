"""Does a row's text depend on its batch? The same request alone, copied, and among neighbours, compared at every step.

    found = list(protocol(model, prompts, batch=4))   # prompts [N, P] of one length
    found[0].same_text, found[0].first                # whether, and where it starts
    first_divergence(model, prompts[:1], batch=4)     # module and operation whose value differs first

Noise is pinned to the row (`sampling.noise`), so that two runs of a request draw the same; `control` shows what they do
without. A causal language model takes the most likely token, without beams, which draws nothing.

Compared are, of every step: the logits (a checksum of each position's bits, before temperature), entropies (the
sampler's, or those of a causal model's logits), what was accepted, the best guess; and of the end: text and stopping
step. Nothing here knows why a value differs;
`measure.divergence` finds where, `measure.invariance_fix` what changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from dglab_utils.errors import LabError
from dglab_utils.measure.divergence import Divergence, checksums, compare
from dglab_utils.sampling.noise import mixed, row_noise
from dglab_utils.sampling.observe import observe

MOST_ROWS = 1024
WHAT = ("logits", "entropy", "accepted", "guess")  # of a step, in the order they follow from each other


# -- one row's run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowRun:
    """What one row of a batch did.

    Attributes:
        tokens: `[T]`, what it was told in the end.
        steps: denoising steps of each canvas; tokens of a causal model.
        iterations: for each of WHAT, `[S, L]` over all steps; L is 1 for a causal model, which has no "accepted".
    """

    tokens: np.ndarray
    steps: tuple[int, ...]
    iterations: dict[str, np.ndarray]


class _Noted(LogitsProcessor):
    """Keeps a checksum of the bits of each position's logits, and what follows from them where no sampler tells."""

    def __init__(self, *, sampler: bool) -> None:
        self.sampler = sampler
        self.sums: list[np.ndarray] = []
        self.entropies: list[np.ndarray] = []
        self.guesses: list[np.ndarray] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        positions = scores.reshape(len(scores), -1, scores.shape[-1])
        self.sums.append(checksums(positions.flatten(0, 1)).view(positions.shape[:2]).cpu().numpy())
        if self.sampler:
            return scores
        # A row at a time: this must not depend on the batch itself. A logit of -inf, a token that is ruled out, adds 0.
        entropies = [torch.special.entr(row.float().softmax(-1)).sum(-1) for row in positions]
        self.entropies.append(torch.stack(entropies).cpu().numpy())
        self.guesses.append(positions.argmax(-1).cpu().numpy())
        return scores


def run_rows(model: PreTrainedModel, prompts: Tensor, row_seeds: Sequence[int], **settings: Any) -> list[RowRun]:
    """Generates once for a batch and tells what each row did.

    Args:
        prompts: `[B, P]` token ids, unpadded.
        row_seeds: one a row, of its noise. A causal model draws none.
        settings: of `generate()`.
    """
    diffusion = isinstance(model, DiffusionGemmaForBlockDiffusion)
    noted = _Noted(sampler=diffusion)
    asked = {"attention_mask": torch.ones_like(prompts), "logits_processor": LogitsProcessorList([noted])}
    if not diffusion:
        return _causal_rows(model, prompts, noted, asked | settings)
    with observe(model, row_seeds=row_seeds) as traces:
        output = model.generate(prompts, **asked, **settings)
    sequences = getattr(output, "sequences", output)[:, prompts.shape[1] :].cpu().numpy()
    canvases = sorted({t.canvas for t in traces})
    begins = np.cumsum([0] + [max(t.steps for t in traces if t.canvas == c) for c in canvases])
    runs = []
    for row in range(len(prompts)):
        own = [t for t in traces if t.row == row and not t.ended_before]
        spans = [slice(begins[t.canvas], begins[t.canvas] + t.steps) for t in own]
        runs.append(
            RowRun(
                tokens=sequences[row][: len(own) * model.config.canvas_length],  # behind it others went on
                steps=tuple(t.steps for t in own),
                iterations={
                    "logits": np.concatenate([np.stack([s[row] for s in noted.sums[span]]) for span in spans]),
                    "entropy": np.concatenate([t.entropy for t in own]),
                    "accepted": np.concatenate([t.accepted for t in own]),
                    "guess": np.concatenate([t.argmax for t in own]),
                },
            )
        )
    return runs


_MOST_LIKELY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}


def _causal_rows(model: PreTrainedModel, prompts: Tensor, noted: _Noted, settings: dict[str, Any]) -> list[RowRun]:
    generated = model.generate(prompts, **_MOST_LIKELY | settings)
    sequences = getattr(generated, "sequences", generated)[:, prompts.shape[1] :].cpu().numpy()
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else np.atleast_1d(ends).tolist()
    runs = []
    for row, tokens in enumerate(sequences):
        at = next((i + 1 for i, token in enumerate(tokens.tolist()) if token in ends), len(tokens))
        iterations = {
            name: np.stack([step[row] for step in steps[:at]])
            for name, steps in (("logits", noted.sums), ("entropy", noted.entropies), ("guess", noted.guesses))
        }
        runs.append(RowRun(tokens[:at], (at,), iterations))
    return runs


# -- the protocol --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where a request stands in a batch.

    Attributes:
        rows: of the batch.
        row: the request's own.
        neighbours: the other rows hold the prompts after it, over and over where there are fewer than rows; else they
            hold copies of it.
    """

    rows: int
    row: int
    neighbours: bool


@dataclass(frozen=True)
class FirstDifference:
    """The earliest step at which anything differs, and what does there."""

    step: int
    position: int
    what: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """One request in one placement against the same request alone.

    Attributes:
        prompt: index among the prompts.
        same_text, same_stop: tokens, and steps of every canvas.
        first: None where nothing differs, at any step.
        growth: share of positions whose logits differ, a step each, as far as both went.
    """

    prompt: int
    placement: Placement
    same_text: bool
    same_stop: bool
    first: FirstDifference | None
    growth: tuple[float, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs: no number of any step, nor text or stopping step."""
        return self.first is None and self.same_text and self.same_stop


def protocol(
    model: PreTrainedModel, prompts: Tensor, *, batch: int = 4, seeds: Sequence[int] | None = None, **settings: Any
) -> Iterator[Comparison]:
    """Runs every prompt alone and in every placement, and compares; one comparison after the other.

    Copies are 2, 4, 8, ... and `batch`; different neighbours fill a batch. Either way each prompt is in each row once.

    Args:
        prompts: `[N, P]` token ids of one length. With one prompt there are no different neighbours to give it.
        batch: rows, 2 or more.
        seeds: of each prompt's noise, wherever it stands; None for those of `row_seeds`.
        settings: of `generate()`.
    """
    check_batch(prompts, batch)
    count, seeds = len(prompts), row_seeds(len(prompts)) if seeds is None else seeds
    alone: list[RowRun] = []
    for i in range(count):
        alone += run_rows(model, prompts[i : i + 1], seeds[i : i + 1], **settings)
        for copies in copies_of(batch):
            copied = run_rows(model, prompts[i : i + 1].repeat(copies, 1), [seeds[i]] * copies, **settings)
            for row, run in enumerate(copied):
                yield compared(i, Placement(copies, row, False), alone[i], run)
    for shift in range(count if count > 1 else 0):
        who = [(shift + row) % count for row in range(batch)]
        runs = run_rows(model, prompts[who], [seeds[i] for i in who], **settings)
        for row, (i, run) in enumerate(zip(who, runs, strict=True)):
            yield compared(i, Placement(batch, row, True), alone[i], run)


def row_seeds(prompts: int, seed: int = 0) -> list[int]:
    """Seeds of the prompts' noise: that of prompt i follows from (seed, i)."""
    return [mixed(seed, i) for i in range(prompts)]


def copies_of(batch: int) -> list[int]:
    """Batches of copies that the protocol tries: 2, 4, 8, ... below `batch`, and `batch`."""
    return [2**i for i in range(1, batch.bit_length()) if 2**i < batch] + [batch]


def comparisons_of(prompts: int, batch: int) -> int:
    """How many comparisons the protocol makes."""
    return prompts * (sum(copies_of(batch)) + (batch if prompts > 1 else 0))


def compared(prompt: int, placement: Placement, alone: RowRun, run: RowRun) -> Comparison:
    """Two runs of one request, step by step."""
    steps = min(len(alone.iterations["logits"]), len(run.iterations["logits"]))
    unlike = {  # [S, L]
        name: _unlike(alone.iterations[name][:steps], run.iterations[name][:steps])
        for name in WHAT
        if name in alone.iterations
    }
    first = None
    for step in range(steps):
        what = tuple(name for name, where in unlike.items() if where[step].any())
        if what:
            first = FirstDifference(step, int(unlike[what[0]][step].argmax()), what)
            break
    return Comparison(
        prompt=prompt,
        placement=placement,
        same_text=np.array_equal(alone.tokens, run.tokens),
        same_stop=alone.steps == run.steps,
        first=first,
        growth=tuple(unlike["logits"].mean(axis=1).tolist()),
    )


def _unlike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where they differ. What is no number in both is alike."""
    return (a != b) & ~((a != a) & (b != b))


def control(
    model: DiffusionGemmaForBlockDiffusion, prompt: Tensor, *, batch: int = 4, seed: int = 0, **settings: Any
) -> dict[str, int]:
    """Different texts among copies of one prompt in one batch: as `generate()` draws noise, and with it pinned.

    Args:
        prompt: `[1, P]` token ids.
    """
    check_batch(prompt, batch)
    rows = prompt.repeat(batch, 1)
    torch.manual_seed(seed)
    drawn = model.generate(rows, attention_mask=torch.ones_like(rows), **settings)
    with row_noise(model, [mixed(seed, 0)] * batch):
        pinned = model.generate(rows, attention_mask=torch.ones_like(rows), **settings)
    texts = {"drawn for the batch": drawn, "pinned to the row": pinned}
    return {
        name: len({tuple(row) for row in getattr(output, "sequences", output).tolist()})
        for name, output in texts.items()
    }


def capped(model: PreTrainedModel, steps: int) -> dict[str, Any]:
    """Settings of `generate()` for so many denoising steps of one canvas, or tokens of a causal model."""
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        return {"max_denoising_steps": steps, "max_new_tokens": model.config.canvas_length}
    return {"max_new_tokens": steps, "min_new_tokens": steps}


def drawn_prompts(model: PreTrainedModel, count: int, tokens: int = 16, seed: int = 0) -> Tensor:
    """`[count, tokens]` random token ids that the model reads, for a question that does not depend on sense.

    None of them is special: padding, ends, images.
    """
    if count < 1 or tokens < 1:
        raise LabError(f"prompts: {count} of {tokens} tokens; want 1 or more of both")
    text = model.config.get_text_config()
    named = [value for config in (model.config, text) for name, value in vars(config).items() if "token_id" in name]
    special = {int(i) for ids in named if ids is not None for i in np.atleast_1d(ids)}
    plain = torch.tensor([i for i in range(3, text.vocab_size) if i not in special])
    drawn = torch.randint(len(plain), (count, tokens), generator=torch.Generator().manual_seed(seed))
    return plain[drawn].to(model.device)


def check_batch(prompts: Tensor, batch: int) -> None:
    """Raises LabError unless these prompts can be run in such a batch and compared with single rows."""
    if prompts.ndim != 2 or not prompts.numel():
        raise LabError(f"prompts of shape {list(prompts.shape)}: want [prompts, tokens], one or more, of one length")
    if not 2 <= batch <= MOST_ROWS:
        raise LabError(f"batch {batch}: to compare with a single row it takes 2 or more, and {MOST_ROWS} at most")


class _Enough(BaseException):
    """Leaves `generate()` in the middle; no `except Exception` on the way may hold it."""


@contextmanager
def _left_after(model: PreTrainedModel, steps: int) -> Iterator[None]:
    """Inside, a generation is left when it would begin another step than the first so many."""
    left = steps

    def enter(*_: Any) -> None:
        nonlocal left
        if not left:
            raise _Enough
        left -= 1

    part = model.model.decoder if isinstance(model, DiffusionGemmaForBlockDiffusion) else model.base_model
    handle = part.register_forward_pre_hook(enter)
    try:
        with suppress(_Enough):
            yield
    finally:
        handle.remove()


def first_divergence(
    model: PreTrainedModel,
    prompt: Tensor,
    *,
    steps: int,
    batch: int = 4,
    row_seed: int | None = None,
    **settings: Any,
) -> Divergence:
    """Module and operation at which copies of a prompt first leave the single row's values.

    Args:
        prompt: `[1, P]` token ids.
        steps: that are looked at, denoising steps or tokens, from the first. The generation is that of the settings,
            and is left after them: a lower cap would be another one, whose temperature falls faster.
        row_seed: of the prompt's noise; None for that of `row_seeds`.
        settings: of `generate()`.
    """
    check_batch(prompt, batch)
    seed = row_seeds(1)[0] if row_seed is None else row_seed

    def work(rows: int) -> None:
        with _left_after(model, steps):
            generate_pinned(model, prompt.repeat(rows, 1), [seed] * rows, settings)

    return compare(model, work, copies=batch)


def generate_pinned(
    model: PreTrainedModel, prompts: Tensor, row_seeds: Sequence[int], settings: dict[str, Any]
) -> Tensor:
    """Sequences, with noise that belongs to the row; nothing is noted on the way."""
    asked = {"attention_mask": torch.ones_like(prompts)} | settings
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        with row_noise(model, row_seeds):
            output = model.generate(prompts, **asked)
    else:
        output = model.generate(prompts, **_MOST_LIKELY | asked)
    return getattr(output, "sequences", output)
