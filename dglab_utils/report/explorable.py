"""The entropy-bound explorable: the accept rule on the confidence ramp, with sliders, on a page without a kernel.

Python passes the ramp's targets and difficulties; `static/entropy_bound.js` does the rest, so that what the reader
moves is computed and not looked up. The page loads that script and `static/dglab.css`.
"""

from __future__ import annotations

import html
import json
from typing import Any, Protocol

from IPython.display import HTML

from dglab_utils.errors import LabError

GROWTHS = (0.25, 8.0)
BOUNDS = (0.001, 100.0)
"""Ends of the two sliders: logits a step, and nats."""


class Ramp(Protocol):
    """What the page needs to know of a `sampling.ramp.ConfidenceRamp`; arrays or tensors of one value a position."""

    @property
    def targets(self) -> Any: ...
    @property
    def difficulty(self) -> Any: ...
    @property
    def growth(self) -> float: ...
    @property
    def hardness(self) -> float: ...
    @property
    def pull(self) -> float: ...
    @property
    def vocab_size(self) -> int: ...


def entropy_bound_explorable(
    ramp: Ramp,
    *,
    entropy_bound: float = 0.1,
    max_denoising_steps: int = 48,
    t_min: float = 0.4,
    t_max: float = 0.8,
    confidence_threshold: float = 0.005,
) -> HTML:
    """The explorable as a notebook output, `.data` as a string; the stop test wants the argmax unchanged for one step.

    Args:
        ramp: its growth is where the slider begins.
        entropy_bound: nats, where the slider begins.
        max_denoising_steps, t_min, t_max, confidence_threshold: as `run_ramp` takes them.

    Raises:
        LabError: a ramp whose logits depend on the canvas, or a growth or bound that is not on its slider.
    """
    if ramp.pull:
        raise LabError(f"pull={ramp.pull}: the explorable knows ramps that ignore the canvas; pass one with pull=0")
    for name, value, (low, high) in (("growth", ramp.growth, GROWTHS), ("entropy_bound", entropy_bound, BOUNDS)):
        if not low <= value <= high:
            raise LabError(f"{name}={value}: the explorable's slider goes from {low} to {high}")
    content = {
        "difficulty": ramp.difficulty.tolist(),
        "targets": ramp.targets.tolist(),
        "hardness": ramp.hardness,
        "vocabSize": ramp.vocab_size,
        "steps": max_denoising_steps,
        "tMin": t_min,
        "tMax": t_max,
        "threshold": confidence_threshold,
        "growth": ramp.growth,
        "bound": entropy_bound,
    }
    return HTML(
        f'<div class="dglab-entropy-bound dglab-host" data-ramp="{html.escape(json.dumps(content))}">'
        "<p>The entropy-bound rule with sliders for growth, bound and step. It needs the book's page with scripts on; "
        "the notebook's figures show the same rule for fixed values.</p></div>"
    )
