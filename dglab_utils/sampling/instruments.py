"""The official sampler, stop test and temperature schedule, each with a window to look through.

Each class here is the official one plus a note of what passed through it. Nothing is computed twice: the entropies
are caught where the official methods hand them on (`accept_canvas` sorts them, the stop test averages them), so that
a traced run does the same arithmetic on the same numbers and draws the same random tokens as an untraced one.

The order of one step (transformers 5.24.0, generation_diffusion_gemma.py, `_denoising_step`, lines 1009-1084) is what
`StepRecorder` leans on: temperature, then accept, then renoise, then the stop test, which closes the step.

    decoder --logits--> schedule --tempered--> accept --mask--> renoise --> stop test
                           |                     |                             |
                       temperature       current, sampled,          argmax, mean entropy,
                                         entropy, accepted          stable, confident, finished
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaAdaptiveStopping,
    EntropyBoundSampler,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from dglab_utils.errors import LabError

ARRAYS = ("current", "argmax", "sampled", "entropy", "accepted", "mean_entropy", "stable", "confident", "logits")


class CaughtArgument(TorchFunctionMode):
    """Keeps the first tensor argument and the result of the first call of `function` made inside the context.

    PyTorch hands every call of its API to the active mode of this thread; all calls go through unchanged.
    """

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function
        self.argument: torch.Tensor | None = None
        self.result: Any = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is self.function and self.argument is None:
            self.argument = args[0] if args else kwargs["input"]
            self.result = result
        return result


@dataclass
class Step:
    """What one denoising step showed, for the rows still being denoised when it began. Tensors on the model's device.

    `rows` are the indices of those rows; every other tensor has one entry a row of `rows`, `[rows, L]` or `[rows]`.
    """

    rows: torch.Tensor
    current: torch.Tensor
    sampled: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    accepted: torch.Tensor
    temperature: float
    mean_entropy: torch.Tensor
    stable: torch.Tensor
    confident: torch.Tensor
    logits: torch.Tensor | None

    def take(self, name: str) -> np.ndarray | None:
        """The field as an array on the host; the step lets go of it."""
        tensor = getattr(self, name)
        setattr(self, name, None)
        return None if tensor is None else tensor.cpu().numpy()


@dataclass
class StepRecorder:
    """Collects the steps of one canvas at a time; the three instruments write to it, in the order of the picture.

    `finished` mirrors the loop's own `finished_denoising`: once the stop test has said yes to a row, it stays so.
    `accept` is what `accept_canvas` saw in the step that is open.
    """

    keep_logits: bool = False
    steps: list[Step] = field(default_factory=list)
    finished: torch.Tensor | None = None
    temperature: float = float("nan")
    scores: torch.Tensor | None = None  # the step's raw logits, for the error message should they be unusable
    accept: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin_canvas(self) -> None:
        """Forgets the canvas before."""
        self.steps, self.finished, self.accept = [], None, {}

    def saw_accept(self, **tensors: torch.Tensor) -> None:
        """Notes what `accept_canvas` read and decided, `[B, L]` each (`logits` `[B, L, V]`)."""
        self.accept = tensors

    def saw_step(
        self,
        argmax: torch.Tensor,
        mean_entropy: torch.Tensor,
        stable: torch.Tensor,
        confident: torch.Tensor,
        finished: torch.Tensor,
    ) -> None:
        """Closes the step, `[B, ...]` each: keeps the rows that were running when it began, then marks the ended."""
        if self.finished is None:
            self.finished = torch.zeros_like(finished)
        running = torch.nonzero(~self.finished).squeeze(-1)
        accept, self.accept = self.accept, {}
        logits = accept["logits"][running].float() if self.keep_logits else None
        self.steps.append(
            Step(
                rows=running,
                # int32 holds any vocabulary and halves what a trace weighs while it grows.
                current=accept["current"][running].int(),
                sampled=accept["sampled"][running].int(),
                argmax=argmax[running].int(),
                entropy=accept["entropy"][running].float(),
                accepted=accept["accepted"][running],
                temperature=self.temperature,
                mean_entropy=mean_entropy[running].float(),
                stable=stable[running],
                confident=confident[running],
                logits=logits,
            )
        )
        self.finished = self.finished | finished
        self.temperature, self.scores = float("nan"), None

    def take_rows(self) -> list[dict[str, Any]]:
        """The canvas, cut into rows: for each, the arrays of a `CanvasTrace` and `stopped`. Empties the recorder.

        A step's field is let go as soon as it is copied, so that steps and arrays are never both held whole.
        """
        assert self.finished is not None, "the stop test closes every step"
        rows: list[dict[str, Any]] = [{"stopped": stopped} for stopped in self.finished.tolist()]
        members = [step.rows.tolist() for step in self.steps]
        taken = [sum(row in there for there in members) for row in range(len(rows))]  # steps, row by row
        for name in ARRAYS:
            for s, (step, there) in enumerate(zip(self.steps, members, strict=True)):
                values = step.take(name)
                if values is None:  # logits that were not kept
                    continue
                for row, value in zip(there, values, strict=True):
                    if s == 0:  # every row takes part in the first step
                        rows[row][name] = np.empty((taken[row], *value.shape), values.dtype)
                    rows[row][name][s] = value
        temperatures = [step.temperature for step in self.steps]
        for arrays, steps in zip(rows, taken, strict=True):
            arrays["temperature"] = np.array(temperatures[:steps], dtype=np.float32)
        self.begin_canvas()
        return rows

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns PyTorch's refusal to draw from unusable logits into one line that says where they are."""
        try:
            yield
        except RuntimeError as error:
            reason = _unusable(self.scores)
            if reason is None:
                raise
            raise LabError(f"logits of step {len(self.steps)}: {reason}") from error
        finally:
            self.scores = None


def _unusable(logits: torch.Tensor | None) -> str | None:
    """Why no distribution can be made of these logits, `[B, L, V]`; None when one can."""
    if logits is None:
        return None
    bad = ~torch.isfinite(logits.float().logsumexp(dim=-1))  # NaN, +inf, or -inf everywhere
    if not bad.any():
        return None
    row, position = (int(i) for i in torch.nonzero(bad)[0])
    kind = "NaN" if logits[row, position].isnan().any() else "infinite"
    return (
        f"{kind} at row {row}, position {position} ({int(bad.sum())} positions in all); look for an overflow in the "
        "weights or dtype, or for a logits processor that leaves no token"
    )


class ObservedSchedule(LinearTemperatureScheduleLogitsProcessor):
    """The official linear temperature schedule; notes the temperature of the step."""

    def __init__(self, recorder: StepRecorder, **settings: Any):
        super().__init__(**settings)
        self.recorder = recorder

    def __call__(
        self, input_ids: torch.Tensor | None, scores: torch.Tensor, cur_step: int | torch.Tensor
    ) -> torch.Tensor:
        """Tempered logits, as the official class gives them; `cur_step` counts the steps that remain."""
        # The same expression as upstream (line 312): the division below happens inside the official call.
        self.recorder.scores = scores
        self.recorder.temperature = self.t_min + (self.t_max - self.t_min) * (int(cur_step) / self.max_denoising_steps)
        return super().__call__(input_ids, scores, cur_step=cur_step)


class ObservedSampler(EntropyBoundSampler):
    """The official entropy-bound sampler; notes what it read, drew and accepted."""

    def __init__(self, recorder: StepRecorder, **settings: Any):
        super().__init__(**settings)
        self.recorder = recorder

    def accept_canvas(
        self,
        current_canvas: torch.Tensor,
        denoiser_canvas: torch.Tensor,
        logits: torch.Tensor,
        cur_step: int | torch.Tensor,
    ) -> torch.Tensor:
        """`[B, L]` the canvas with the accepted candidates, as the official method gives it."""
        with CaughtArgument(torch.sort) as caught:
            accepted = super().accept_canvas(current_canvas, denoiser_canvas, logits, cur_step)
        entropy = caught.argument
        if entropy is None:
            raise LabError("accept_canvas no longer sorts its entropies: this Transformers version is not supported")
        self.recorder.saw_accept(
            current=current_canvas,
            sampled=denoiser_canvas,
            entropy=entropy,
            accepted=self.accepted_token_mask,
            logits=logits,
        )
        return accepted


class ObservedStop(StableAndConfidentStoppingCriteria):
    """The official stop test; notes its two halves and closes the step."""

    def __init__(self, recorder: StepRecorder, **settings: Any):
        super().__init__(**settings)
        self.recorder = recorder

    def __call__(self, argmax_canvas: torch.Tensor, logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`[B]` whether each row stops, as the official test gives it."""
        history = self.argmax_canvas_history
        with CaughtArgument(torch.mean) as caught:
            stops = super().__call__(argmax_canvas, logits, **kwargs)
        mean_entropy = caught.result
        if mean_entropy is None:
            raise LabError("the stop test no longer averages entropies: this Transformers version is not supported")
        if self.stability_threshold == 0:
            stable = torch.ones_like(stops)
        elif history is None:
            stable = torch.zeros_like(stops)
        else:
            stable = (history == argmax_canvas[None]).all(dim=-1).all(dim=0)
        self.recorder.saw_step(argmax_canvas, mean_entropy, stable, mean_entropy < self.confidence_threshold, stops)
        return stops


class ObservedCap(DiffusionGemmaAdaptiveStopping):
    """Closes the steps where `generate()` was asked to run without a stop test: no row ever stops before the cap."""

    def __init__(self, recorder: StepRecorder):
        self.recorder = recorder

    def __call__(self, argmax_canvas: torch.Tensor, logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`[B]` False."""
        never = torch.zeros(argmax_canvas.shape[0], dtype=torch.bool, device=argmax_canvas.device)
        self.recorder.saw_step(argmax_canvas, self.recorder.accept["entropy"].mean(dim=-1), never, never, never)
        return never
