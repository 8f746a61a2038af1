"""Noise pinned to a row: the draws of a request do not depend on who shares its batch.

The official loop draws for the whole batch from one global generator (`torch.multinomial` over the flattened batch,
`torch.randint` for the canvas), so that two copies of a row in one batch differ by their noise alone. `RowNoiseSampler`
is the official sampler with a generator for each row. A generator is seeded anew for each canvas: how long the
neighbours kept a canvas going must not shift the draws of the next one.

The loop still draws candidates from the global generator; they are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

from dglab_utils.errors import LabError
from dglab_utils.sampling.hooks import replaced


def mixed(*numbers: int) -> int:
    """One 64-bit seed from several non-negative numbers; different numbers give unrelated seeds.

    Raises:
        LabError: a negative number, or one that is no integer.
    """
    for number in numbers:
        if not isinstance(number, int) or number < 0:
            raise LabError(f"seed {number!r}: seeds are integers from 0")
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


_drawing = ContextVar("drawing", default=False)


def drawing() -> bool:
    """Whether noise is being drawn row by row right now: operations that a batch has more of, on purpose."""
    return _drawing.get()


@contextmanager
def _draws() -> Iterator[None]:
    token = _drawing.set(True)
    try:
        yield
    finally:
        _drawing.reset(token)


class RowNoiseSampler(EntropyBoundSampler):
    """The official sampler, drawing row i's canvas and candidates from a generator seeded with `row_seeds[i]`."""

    def __init__(self, row_seeds: Sequence[int], **settings: Any):
        super().__init__(**settings)
        self.row_seeds = list(row_seeds)
        self.canvas = -1
        self.generators: list[torch.Generator] = []

    def begin_canvas(self, device: torch.device) -> None:
        """Seeds the generators for the next canvas, from (row seed, index of the canvas)."""
        self.canvas += 1
        self.generators = [torch.Generator(device).manual_seed(mixed(seed, self.canvas)) for seed in self.row_seeds]

    def initialize_canvas(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """`[B, L]` uniform tokens, each row from its own generator."""
        if batch_size != len(self.row_seeds):
            raise LabError(f"row_seeds: {len(self.row_seeds)} seeds for a batch of {batch_size} rows; give one a row")
        with _draws():
            drawn = [
                torch.randint(0, self.vocab_size, (self.canvas_length,), generator=g, device=device)
                for g in self.generators
            ]
            return torch.stack(drawn)

    def accept_canvas(
        self,
        current_canvas: torch.Tensor,
        denoiser_canvas: torch.Tensor,
        logits: torch.Tensor,
        cur_step: int | torch.Tensor,
    ) -> torch.Tensor:
        """`[B, L]` as the official method gives it, for candidates drawn here instead of `denoiser_canvas`."""
        with _draws():
            drawn = [
                torch.multinomial(torch.softmax(row, dim=-1, dtype=torch.float32), 1, generator=g).squeeze(-1)
                for row, g in zip(logits, self.generators, strict=True)
            ]
            candidates = torch.stack(drawn)
        return super().accept_canvas(current_canvas, candidates, logits, cur_step)


@contextmanager
def row_noise(model: PreTrainedModel, row_seeds: Sequence[int]) -> Iterator[None]:
    """Inside, `model.generate()` draws each row's noise from a generator of its own.

    Args:
        row_seeds: one non-negative seed a row of the batch; equal seeds and equal prompts draw equal noise.
    """

    def prepare_sampler(generation_config: Any) -> RowNoiseSampler:
        return RowNoiseSampler(row_seeds, **sampler_settings(model, generation_config))

    def prepare_denoiser_inputs(**kwargs: Any) -> tuple:
        kwargs["sampler"].begin_canvas(kwargs["device"])
        return type(model)._prepare_denoiser_inputs(model, **kwargs)

    with replaced(model, _prepare_sampler=prepare_sampler, _prepare_denoiser_inputs=prepare_denoiser_inputs):
        yield


def sampler_settings(model: PreTrainedModel, generation_config: Any) -> dict[str, Any]:
    """What the official `_prepare_sampler` gives its sampler (generation_diffusion_gemma.py:1214-1221)."""
    return {
        "config": generation_config.sampler_config,
        "canvas_length": model.config.canvas_length,
        "vocab_size": model.config.text_config.vocab_size,
        "max_denoising_steps": generation_config.max_denoising_steps,
    }
