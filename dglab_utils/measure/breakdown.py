"""Where the time of a step goes, by component.

Hooks on the official modules stamp the moments at which one component ends and the next begins; nothing is replaced.
The stamps partition the step: every moment belongs to the component that was entered last.

    attention             self_attn of every layer, with the cache's update or concatenation
    dense MLP             mlp of every layer
    router and experts    router and experts of every layer
    LM head               the product with the vocabulary, without the cap
    self-conditioning     softmax of the last logits, its product with the embeddings, and the module behind it
    sampler               from the end of the LM head to the end of the step: cap, softmax, draws, entropies, ...
    rest                  what lies between: norms, residual sums, rotary angles, masks, embedding, Python

A sum over such parts equals the stamped step whatever the hooks cost, so it proves nothing. The same step is therefore
timed without any hook, in turns with the stamped one, and `summed` compares the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import DiffusionGemmaForBlockDiffusion

from dglab_utils.measure.costs import COMPONENTS
from dglab_utils.measure.timing import Device, Ratio, Run, Work, in_turns, ratio

_OF_LAYER = {
    "self_attn": "attention",
    "mlp": "dense MLP",
    "router": "router and experts",
    "experts": "router and experts",
}


@dataclass(frozen=True)
class Breakdown:
    """Seconds of a step by component, and of the same step without hooks.

    Attributes:
        parts: component to `[rounds]`.
        whole: `[rounds]`, measured without hooks in turn with the parts.
    """

    parts: dict[str, np.ndarray]
    whole: np.ndarray

    @property
    def summed(self) -> Ratio:
        """Sum of the parts over the whole, round by round: above one by what the hooks added."""
        return ratio(sum(self.parts.values(), np.zeros_like(self.whole)), self.whole)

    def share(self, component: str) -> float:
        """The component's median share of the stamped step."""
        return float(np.median(self.parts[component] / sum(self.parts.values())))


def breakdown(
    model: DiffusionGemmaForBlockDiffusion,
    step: Run,
    *,
    before: Run | None = None,
    rounds: int,
    warmup: int | None = None,
    device: Device = "cpu",
    each_round: Run | None = None,
) -> Breakdown:
    """Times `step` with and without stamps, in turns.

    Args:
        model: whose modules `step` runs, not compiled: compiled code has no modules left to hook.
        step: such as `CanvasStepper.step` or `TokenStepper.step`.
        before: puts the state back before each step, not timed.
        rounds, warmup: counted steps of each kind, at least 2, and steps before them (`timing.in_turns`).
        each_round: called after each round.
    """
    timelines: list[_Timeline] = []

    def with_stamps() -> None:
        timeline = _Timeline(device)
        with _stamping(model, timeline.enter):
            timeline.enter("rest")
            step()
            timeline.enter("end")
        timelines.append(timeline)

    works = {"stamped": Work(with_stamps, before), "whole": Work(step, before)}
    times = in_turns(works, rounds=rounds, warmup=warmup, device=device, each_round=each_round)
    stamped = [timeline.seconds() for timeline in timelines[-rounds:]]  # those of the warm-up come first
    parts = {component: np.array([one[component] for one in stamped]) for component in COMPONENTS}
    return Breakdown(parts, times["whole"])


class _Timeline:
    """Stamps of one step; on a GPU events in its queue, so that nothing waits for it."""

    def __init__(self, device: Device):
        self.on_gpu = torch.device(device).type == "cuda"
        self.stream = torch.cuda.current_stream(device) if self.on_gpu else None
        self.entered: list[tuple[str, Any]] = []

    def enter(self, component: str) -> None:
        if self.on_gpu:
            stamp: Any = torch.cuda.Event(enable_timing=True)
            stamp.record(self.stream)
        else:
            stamp = time.perf_counter()
        self.entered.append((component, stamp))

    def seconds(self) -> dict[str, float]:
        """Component to seconds; those that were never entered took none. The device's queue must be empty."""
        found = dict.fromkeys(COMPONENTS, 0.0)
        for (component, began), (_, ended) in zip(self.entered, self.entered[1:], strict=False):
            found[component] += began.elapsed_time(ended) / 1e3 if self.on_gpu else ended - began
        return found


@contextmanager
def _stamping(model: DiffusionGemmaForBlockDiffusion, enter: Callable[[str], None]) -> Iterator[None]:
    """Inside, modules of the model call `enter` with the component that begins, and with the one after them."""

    def on_enter(component: str, *_: Any) -> None:
        enter(component)

    handles: list[RemovableHandle] = []

    def watch(module: torch.nn.Module, component: str | None, then: str) -> None:
        if component is not None:
            handles.append(module.register_forward_pre_hook(partial(on_enter, component)))
        handles.append(module.register_forward_hook(partial(on_enter, then)))

    decoder, encoder = model.model.decoder, model.model.encoder.language_model
    for layer in (*decoder.layers, *encoder.layers):
        for name, component in _OF_LAYER.items():
            watch(getattr(layer, name), component, "rest")
    # The product with the embeddings stands in the decoder's forward, between these two modules.
    watch(decoder.embed_tokens, None, "self-conditioning")
    watch(decoder.self_conditioning, None, "rest")
    watch(model.lm_head, "LM head", "sampler")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
