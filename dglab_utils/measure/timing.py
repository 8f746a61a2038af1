"""Timing two things against each other.

A ratio is taken pair by pair from interleaved runs, so that a machine that speeds up or slows down moves both sides of
a pair together; its interval is a bootstrap over the pairs. Absolute times of a shared machine mean little, ratios of
one run hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dglab_utils.errors import LabError


@dataclass(frozen=True)
class Ratio:
    """The median of pairwise ratios a/b, and the interval that holds it."""

    median: float
    low: float
    high: float
    level: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.level:.0%} interval {self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def seconds(run: Callable[[], object], device: str | torch.device = "cpu") -> float:
    """Wall-clock seconds of one call; on a GPU until its queue is empty."""
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - began


def interleaved(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    pairs: int,
    warmup: int = 1,
    device: str | torch.device = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of `a` and of `b`, `[pairs]` each, run in turn; every second pair runs b first.

    Args:
        pairs: counted pairs, at least 2.
        warmup: pairs run before, not counted.
    """
    if pairs < 2:
        raise LabError(f"pairs={pairs}: an interval needs at least 2")
    for _ in range(warmup):
        a(), b()
    times = np.empty((pairs, 2))
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[pair, side] = seconds((a, b)[side], device)
    return times[:, 0], times[:, 1]


def ratio(a: np.ndarray, b: np.ndarray, *, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Ratio:
    """The pairwise ratio a/b of interleaved times, with a percentile bootstrap interval of its median.

    Source of the method: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    if a.shape != b.shape or a.size < 2:
        raise LabError(f"ratio: {a.size} and {b.size} times; want as many of each, at least 2")
    ratios = a / b
    picked = np.random.default_rng(seed).integers(0, ratios.size, (draws, ratios.size))
    medians = np.median(ratios[picked], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high), level, ratios.size)


def _wait(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
