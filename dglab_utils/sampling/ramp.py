"""A confidence ramp: logits without a model, for the official sampler, schedule and stop test.

Each of L positions has a target token and a difficulty d ~ U(0, 1). At elapsed step e the target's logit is

    max(0, growth * e + pull * n(canvas) - hardness * d)            and every other logit is 0,

where n is the share of the position's neighbours that already hold their target. With `pull` = 0 this is the first
lab's ramp (its experiment B): confidence grows with time alone, whatever the canvas holds, so what is accepted changes
nothing that follows. With `pull` > 0 accepted tokens make their neighbours confident, as context does in a model, and
the bound on entropy gets something to act on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from dglab_utils.errors import LabError
from dglab_utils.sampling.instruments import ObservedSampler, ObservedSchedule, ObservedStop, StepRecorder
from dglab_utils.sampling.noise import mixed
from dglab_utils.sampling.trace import CanvasTrace


@dataclass(frozen=True)
class ConfidenceRamp:
    """A synthetic denoiser over one canvas.

    Attributes:
        growth: logits a step by which every target gains.
        canvas_length, vocab_size: of the canvas.
        seed: of targets and difficulties, drawn in this order from one CPU generator as the first lab drew them.
        hardness: logits by which the hardest position lags behind the easiest.
        pull: logits that a position gains when all its neighbours hold their target.
        reach: neighbours looked at on either side.
    """

    growth: float = 1.0
    canvas_length: int = 256
    vocab_size: int = 1000
    seed: int = 0
    hardness: float = 8.0
    pull: float = 0.0
    reach: int = 4

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}: want {wanted}"
            for name, value, wanted, right in (
                ("growth", self.growth, "a finite number", math.isfinite(self.growth)),
                ("canvas_length", self.canvas_length, "at least 1", self.canvas_length >= 1),
                ("vocab_size", self.vocab_size, "at least 2", self.vocab_size >= 2),
                ("hardness", self.hardness, "a finite number", math.isfinite(self.hardness)),
                ("pull", self.pull, "a finite number >= 0", math.isfinite(self.pull) and self.pull >= 0),
                ("reach", self.reach, "at least 1", self.reach >= 1),
                ("pull", self.pull, "0 on a canvas of one position", not self.pull or self.canvas_length > 1),
            )
            if not right
        ]
        if wrong:
            raise LabError(f"ramp: {wrong[0]}")

    @cached_property
    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        # One row of a batch of one: the order and shape of the draws decide their values.
        targets = torch.randint(0, self.vocab_size, (1, self.canvas_length), generator=generator)
        return targets[0], torch.rand(1, self.canvas_length, generator=generator)[0]

    @property
    def targets(self) -> torch.Tensor:
        """[L] int64, the token each position converges to."""
        return self._drawn[0]

    @property
    def difficulty(self) -> torch.Tensor:
        """[L] float32 in [0, 1)."""
        return self._drawn[1]

    def support(self, canvas: torch.Tensor) -> torch.Tensor:
        """[L] share of each position's neighbours, up to `reach` on either side, that hold their target."""
        right = torch.nn.functional.pad((canvas == self.targets).float(), (self.reach, self.reach))
        there = torch.nn.functional.pad(torch.ones(self.canvas_length), (self.reach, self.reach))
        near = [i for i in range(2 * self.reach + 1) if i != self.reach]
        at = [slice(i, i + self.canvas_length) for i in near]
        return torch.stack([right[a] for a in at]).sum(dim=0) / torch.stack([there[a] for a in at]).sum(dim=0)

    def logits(self, elapsed: int, canvas: torch.Tensor) -> torch.Tensor:
        """[L, V] float32 logits at `elapsed` steps (from 0), for the canvas `[L]` that enters the step."""
        margin = self.growth * elapsed - self.hardness * self.difficulty
        if self.pull:
            margin = margin + self.pull * self.support(canvas)
        logits = torch.zeros(self.canvas_length, self.vocab_size)
        return logits.scatter_(-1, self.targets[:, None], margin.clamp(min=0.0)[:, None])


def run_ramp(
    ramp: ConfidenceRamp,
    *,
    entropy_bound: float = 0.1,
    max_denoising_steps: int = 48,
    t_min: float = 0.4,
    t_max: float = 0.8,
    stability_threshold: int = 1,
    confidence_threshold: float = 0.005,
    seed: int = 0,
    keep_logits: bool = False,
) -> CanvasTrace:
    """Denoises one canvas of the ramp with the official sampler, schedule and stop test.

    The loop is the inner loop of `generate()` for one row (generation_diffusion_gemma.py:1009-1084) with the ramp in
    the decoder's place.

    Args:
        ramp: anything with `canvas_length`, `vocab_size`, `seed` and `logits(elapsed, canvas [L]) -> [L, V]`.
        entropy_bound: nats, > 0.
        max_denoising_steps, t_min, t_max, stability_threshold, confidence_threshold: as in the official generation
            config, whose defaults these are.
        seed: of the draws (canvas, candidates, renoise); the global generator is put back afterwards.
        keep_logits: keep the tempered logits in the trace.

    Raises:
        LabError: a setting out of range, or logits from which nothing can be drawn.
    """
    settings = {
        "max_denoising_steps": max_denoising_steps,
        "t_min": t_min,
        "t_max": t_max,
        "stability_threshold": stability_threshold,
        "confidence_threshold": confidence_threshold,
    }
    sampler_config = _checked(settings, entropy_bound)
    recorder = StepRecorder(keep_logits=keep_logits)
    sampler = ObservedSampler(
        recorder=recorder,
        config=sampler_config,
        canvas_length=ramp.canvas_length,
        vocab_size=ramp.vocab_size,
        max_denoising_steps=max_denoising_steps,
    )
    schedule = ObservedSchedule(recorder, t_min=t_min, t_max=t_max, max_denoising_steps=max_denoising_steps)
    stop = ObservedStop(
        recorder, stability_threshold=stability_threshold, confidence_threshold=float(confidence_threshold)
    )
    with torch.random.fork_rng(devices=[]), recorder.explaining():
        # Not `seed` itself: with the seed of the targets, the first canvas would be the targets.
        torch.manual_seed(mixed(seed, ramp.seed))
        canvas = sampler.initialize_canvas(1, torch.device("cpu"))  # [1, L]
        for elapsed in range(max_denoising_steps):
            remaining = max_denoising_steps - elapsed
            logits = schedule(None, ramp.logits(elapsed, canvas[0])[None], cur_step=remaining)  # [1, L, V]
            probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
            candidates = torch.multinomial(probabilities[0], num_samples=1).T  # [1, L]
            canvas = sampler.accept_canvas(canvas, candidates, logits, remaining)
            canvas = sampler.renoise_canvas(canvas, remaining)
            if stop(logits.argmax(dim=-1), logits).all():
                break
    (arrays,) = recorder.take_rows()
    return CanvasTrace(
        **arrays,
        output=arrays["argmax"][-1],
        prompt=np.empty(0, dtype=np.int32),
        settings={**settings, "entropy_bound": sampler_config.entropy_bound, "vocab_size": ramp.vocab_size},
        seed=seed,
        model=repr(ramp),
        dtype="float32",
        device="cpu",
    )


def _checked(settings: dict[str, float], entropy_bound: float) -> EntropyBoundSamplerConfig:
    """The sampler's config, after the official validators have seen every setting."""
    for name, value in {"entropy_bound": entropy_bound, **settings}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise LabError(f"{name}={value!r}: want a finite number")
    try:
        # Upstream's message for a bad threshold names an attribute that does not exist: an AttributeError
        # instead of the ValueError that was meant (generation_diffusion_gemma.py:182-188).
        DiffusionGemmaGenerationConfig(**settings)
        return EntropyBoundSamplerConfig(entropy_bound=float(entropy_bound))
    except AttributeError:
        raise LabError(
            f"stability_threshold={settings['stability_threshold']!r}, "
            f"confidence_threshold={settings['confidence_threshold']!r}: want an integer >= 0 and a float > 0"
        ) from None
    except ValueError as error:
        raise LabError(str(error)) from None
