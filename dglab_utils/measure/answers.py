"""How often a model is right, and what it takes: nano's tasks answered by diffusion and a token at a time.

    held_out = held_out_examples(200, seed="a", tasks=["reverse"])
    told = by_diffusion(model, held_out, entropy_bound=0.1)
    share_of(a.right for a in told)                     # Share(share=0.995, low=0.972, high=0.999, count=200)

Both ways answer the same prompts with the same weights and count alike: an answer ends before the first EOS; a forward
is one pass that brings it on, a denoising step or a token. Reading the prompt, and a finished canvas, is not counted.

Diffusion draws a row's noise from a generator of its own (`sampling.noise`), whoever shares its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from dglab_utils.errors import LabError
from dglab_utils.measure.timing import in_turns
from dglab_utils.models.decoding import TokenStepper
from dglab_utils.models.nano import CANVAS, EOS_ID, answers, batch_of, check_is_nano, tokenizer
from dglab_utils.models.nano_tasks import LETTERS, TASKS, Example, asked_in
from dglab_utils.sampling.noise import mixed
from dglab_utils.sampling.observe import observe
from dglab_utils.sampling.trace import CanvasTrace

ROWS = 64  # of a batch
# Of draws a token at a time on open tasks: the middle of what diffusion cools through, 0.8 to 0.4.
OPEN_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Answer:
    """One prompt's answer.

    Attributes:
        text: up to the first EOS.
        right: the task accepts it.
        forwards: denoising steps of all canvases, or tokens, this row took.
        tokens: of the answer, the first EOS included.
        traces: one a canvas; empty unless kept, and where tokens were written one at a time.
    """

    example: Example
    text: str
    right: bool
    forwards: int
    tokens: int
    traces: tuple[CanvasTrace, ...] = ()

    @property
    def answer_traces(self) -> list[CanvasTrace]:
        """The traces without the positions behind the answer's EOS, which are certain at once."""
        lengths = [self.tokens - CANVAS * trace.canvas for trace in self.traces]
        return [t.first(min(CANVAS, n)) for t, n in zip(self.traces, lengths, strict=True) if n > 0]


@dataclass(frozen=True)
class Share:
    """A share of `count` independent cases with the interval that holds it at 95 % (Wilson's)."""

    share: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.share:.1%} ({self.low:.1%} to {self.high:.1%}, n = {self.count})"


def share_of(cases: Iterable[bool]) -> Share:
    """The share of cases that hold.

    Source of the interval: E. B. Wilson, Journal of the American Statistical Association 22 (1927).

    Raises:
        LabError: no case.
    """
    told = list(cases)
    if not told:
        raise LabError("share: no case to count")
    interval = binomtest(sum(told), len(told)).proportion_ci(method="wilson")
    return Share(sum(told) / len(told), float(interval.low), float(interval.high), len(told))


def by_diffusion(
    model: DiffusionGemmaForBlockDiffusion,
    examples: Sequence[Example],
    *,
    seed: int = 0,
    keep: bool = False,
    rows: int = ROWS,
    entropy_bound: float | None = None,
    **settings: Any,
) -> list[Answer]:
    """Answers in the order of the examples, through the official `generate()`.

    Args:
        seed: of the noise; example i draws from a generator seeded with (seed, i).
        keep: the traces.
        rows: of a batch.
        entropy_bound: of the sampler; the checkpoint's where None.
        settings: of `generate()`, such as `max_denoising_steps`.
    """
    if entropy_bound is not None:
        if entropy_bound <= 0:
            raise LabError(f"entropy bound {entropy_bound}: want more than 0 nats")
        settings["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=float(entropy_bound))
    check_is_nano(model)
    found: dict[int, Answer] = {}
    for batch in _batches(examples, rows, lambda e: len(e.answer) >= CANVAS):
        asked = batch_of(tokenizer(), [examples[i].prompt for i in batch], model.device)
        with observe(model, row_seeds=[mixed(seed, i) for i in batch]) as traces:
            output = model.generate(**asked, **settings).sequences[:, asked["input_ids"].shape[1] :]
        for row, i in enumerate(batch):
            own = tuple(t for t in traces if t.row == row and not t.ended_before)
            found[i] = _answered(examples[i], output[row], sum(t.steps for t in own), own if keep else ())
    return [found[i] for i in range(len(examples))]


def a_token_at_a_time(
    model: DiffusionGemmaForBlockDiffusion,
    examples: Sequence[Example],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    rows: int = ROWS,
    most: int = 2 * CANVAS,
) -> list[Answer]:
    """Answers in the order of the examples, by the encoder as a causal language model, the same weights.

    Args:
        temperature: 0 takes the most likely token. Draws come from one generator, so they depend on the batch.
        most: tokens after which an answer is cut off.
    """
    check_is_nano(model)
    found: dict[int, Answer] = {}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        # A stepper wants prompts of one length.
        for batch in _batches(examples, rows, lambda e: len(e.prompt)):
            asked = batch_of(tokenizer(), [examples[i].prompt for i in batch], model.device)
            for row, i in zip(_written(model, asked["input_ids"], temperature, most), batch, strict=True):
                taken = row.tolist().index(EOS_ID) + 1 if EOS_ID in row else len(row)
                found[i] = _answered(examples[i], row, taken)
    return [found[i] for i in range(len(examples))]


def wall_time(
    model: DiffusionGemmaForBlockDiffusion, examples: Sequence[Example], *, rounds: int, temperature: float = 0.0
) -> dict[str, np.ndarray]:
    """Seconds of one batch by diffusion and a token at a time, `[rounds]` each, run in turns and not observed.

    Args:
        examples: with prompts of one length.
    """
    asked = batch_of(tokenizer(), [e.prompt for e in examples], model.device)
    works = {
        "diffusion": lambda: model.generate(**asked),
        "one at a time": lambda: _written(model, asked["input_ids"], temperature, 2 * CANVAS),
    }
    return in_turns(works, rounds=rounds, warmup=1, device=model.device)


def _written(
    model: DiffusionGemmaForBlockDiffusion, prompt: torch.Tensor, temperature: float, most: int
) -> torch.Tensor:
    """`[B, T]`: tokens until every row has ended, `most` of them at most."""
    stepper = TokenStepper(model, prompt, temperature=temperature)
    written: list[torch.Tensor] = []
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    while len(written) < most and not ended.all():
        written.append(stepper.step())
        ended |= written[-1] == EOS_ID
    return torch.stack(written, dim=1)


@dataclass(frozen=True)
class Variety:
    """How different right answers to one prompt are.

    Attributes:
        draws: right answers.
        distinct: different ones among them.
        even: different ones to expect of as many even draws from all that are right.
        ways: all that are right.
    """

    draws: int
    distinct: int
    even: float
    ways: int


def variety(told: Sequence[Answer]) -> Variety:
    """Of repeated answers to one prompt. Raises LabError where there is none, or another prompt among them."""
    prompts = sorted({answer.example.prompt for answer in told})
    if len(prompts) != 1:
        raise LabError(f"variety: want answers to one prompt, not to {len(prompts)}")
    ways = TASKS[told[0].example.task].ways(asked_in(prompts[0]))
    right = [answer.text for answer in told if answer.right]
    # 1 - (1 - 1/ways)^draws, which loses its digits where there are very many ways.
    even = ways * -math.expm1(len(right) * math.log1p(-1 / ways)) if ways > 1 else min(1.0, len(right))
    return Variety(len(right), len(set(right)), even, ways)


def repeated(a_level: int, *, seed: str, tasks: Sequence[str]) -> list[Example]:
    """So many times the same held-out prompt of each level shown, of tasks with many right answers."""
    draw, found = Random(seed), []
    for task in (TASKS[name] for name in tasks if not TASKS[name].closed):
        for level in task.shown:
            found += [task.example(level, draw, held_out=True)] * a_level
    return found


def forwards_of(told: Iterable[Answer]) -> np.ndarray:
    """`[answers]`: forwards of each."""
    return np.array([answer.forwards for answer in told])


def aup(tokens_per_forward: Sequence[float], accuracy: Sequence[float], *, alpha: float = 3.0) -> float:
    """Accuracy under parallelism: one number for a curve of accuracy over tokens a forward.

        rho_1 y_1 + sum over i of (rho_i - rho_(i-1)) (y_i W_i + y_(i-1) W_(i-1)) / 2
        W = min(exp(-alpha (1 - y / y_max)), 1)

    Points are taken in the order of their tokens a forward; y_max is the best accuracy of this curve, where the source
    takes the best of all methods that it compares.

    Source: arXiv 2601.07568.

    Args:
        tokens_per_forward: rho, of each setting.
        accuracy: y, in per cent, of each setting.
    """
    if len(tokens_per_forward) != len(accuracy) or not len(accuracy):
        raise LabError(f"aup: {len(tokens_per_forward)} speeds to {len(accuracy)} accuracies; want as many")
    rho, y = np.array(sorted(zip(tokens_per_forward, accuracy, strict=True))).T
    if y.max() == 0:
        return 0.0
    weighted = y * np.minimum(np.exp(-alpha * (1 - y / y.max())), 1)
    return float(rho[0] * y[0] + (np.diff(rho) * (weighted[1:] + weighted[:-1]) / 2).sum())


def total_correlation(example: Example, accepted: np.ndarray) -> float:
    """Nats that accepted positions share where only the prompt is known: sum of their entropies less the joint one.

    Counted for a palindrome, of which each mirrored pair shares ln 26; and for a shuffle of n different letters, where
    k positions hold ln n nats each and ln(n! / (n - k)!) together.

    Args:
        accepted: `[L]` bool; positions behind the answer are certain and share nothing.

    Raises:
        LabError: another task.
    """
    taken = np.flatnonzero(accepted[: example.level])
    if example.task == "palindrome":
        mirrored = set((example.level - 1 - taken).tolist()) & set(taken.tolist())
        return sum(i < example.level - 1 - i for i in mirrored) * math.log(len(LETTERS))
    if example.task == "shuffle":
        return sum(math.log(example.level) - math.log(example.level - i) for i in range(len(taken)))
    raise LabError(f"total correlation: not counted for {example.task}; for palindrome and shuffle it is")


def _answered(example: Example, row: torch.Tensor, forwards: int, traces: tuple[CanvasTrace, ...] = ()) -> Answer:
    text = answers(row[None])[0]
    tokens = row.tolist().index(EOS_ID) + 1 if EOS_ID in row else len(row)
    right = EOS_ID in row and TASKS[example.task].accepts(example.prompt, text)
    return Answer(example, text, right, forwards, tokens, traces)


def _batches(examples: Sequence[Example], rows: int, alike: Any) -> list[list[int]]:
    """Indices of examples, in batches of those that are alike: a batch goes on for as long as its longest row."""
    if not examples:
        raise LabError("answers: no examples given")
    groups: dict[Any, list[int]] = {}
    for i, example in enumerate(examples):
        groups.setdefault(alike(example), []).append(i)
    return [group[i : i + rows] for _, group in sorted(groups.items()) for i in range(0, len(group), rows)]
