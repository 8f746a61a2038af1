"""How many experts a forward touches: the weights that must be read, in a mixture of experts.

A token uses k of E experts in every layer. T tokens that chose independently and evenly would together use

    E (1 - (1 - k/E)^T)

different ones. A canvas of 256 positions is T = 256 B tokens at batch B, an autoregressive step T = B: with E = 128 and
k = 8 the first touches practically all experts and the second few. Here a hook on every router counts what is in fact
touched; trained routers prefer some experts, and alike tokens choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaTextRouter

from dglab_utils.errors import LabError
from dglab_utils.measure.timing import Run


@dataclass(frozen=True)
class Coverage:
    """Distinct experts that one forward touched.

    Attributes:
        experts, chosen: E and k.
        tokens: T, that went through every router.
        distinct: one count a layer.
    """

    experts: int
    chosen: int
    tokens: int
    distinct: tuple[int, ...]

    @property
    def expected(self) -> float:
        """The count for independent and even choices."""
        return expected_experts(self.experts, self.chosen, self.tokens)


def expected_experts(experts: int, chosen: int, tokens: int) -> float:
    """E (1 - (1 - k/E)^T): expected distinct experts of T tokens, each choosing k of E evenly and independently."""
    return experts * (1 - (1 - chosen / experts) ** tokens)


def coverage(part: nn.Module, forward: Run) -> Coverage:
    """What the routers inside `part` choose during `forward`, which runs the part once.

    Args:
        part: such as `model.model.decoder` for a canvas or `model.model.encoder` for a token.
        forward: such as `CanvasStepper.forward` or `TokenStepper.forward`, not compiled.

    Raises:
        LabError: `part` has no routers, or `forward` did not run each of them once.
    """
    routers = [module for module in part.modules() if isinstance(module, DiffusionGemmaTextRouter)]
    if not routers:
        raise LabError(f"{type(part).__name__} has no routers: no mixture of experts to count")
    with _choices(routers) as seen:
        forward()
    if len(seen) != len(routers):
        raise LabError(f"{len(seen)} router calls of {len(routers)} routers: give a forward that runs this part once")
    config = routers[0].config
    distinct = tuple(int(torch.unique(choice).numel()) for choice in seen)
    return Coverage(config.num_experts, config.top_k_experts, seen[0].shape[0], distinct)


@contextmanager
def _choices(routers: list[DiffusionGemmaTextRouter]) -> Iterator[list[Tensor]]:
    """Inside, every router call adds its `[T, k]` expert indices to the list."""
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple, output: tuple) -> None:
        seen.append(output[2])  # (probabilities, weights, indices)

    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
