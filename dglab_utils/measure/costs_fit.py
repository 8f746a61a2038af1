"""Efficiencies from times: the cost model's three free numbers, fitted to a few published or measured figures.

Knows nothing of where the figures come from: each is a prediction, a function of the efficiencies, and what it should
have been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from dglab_utils.errors import LabError
from dglab_utils.measure.costs import Efficiency

FREE = ("bandwidth", "peak", "overhead")
_LOWEST = {"bandwidth": 1e-3, "peak": 1e-3, "overhead": 1e-9}
_HIGHEST_OVERHEAD = 1.0  # s a layer
_TEN = np.log(10.0)


def fit(
    predictions: Sequence[Callable[[Efficiency], float]],
    targets: Sequence[float],
    *,
    start: Efficiency,
    free: Sequence[str] = FREE,
    highest: float = 1.0,
) -> Efficiency:
    """The efficiencies whose predictions miss the targets least, in the sum of squared logarithms of their ratios.

    Args:
        predictions: each a positive figure, as a function of the efficiencies.
        targets: what each was published or measured to be, in the same unit.
        start: where the search begins, and the value of what is not free.
        free: names of `Efficiency`'s fields to fit, no more than there are targets.
        highest: the largest fraction of bandwidth or peak; above 1 where the peak itself is only an estimate.

    Raises:
        LabError: more free numbers than figures, a name that is none, or a search that did not converge.
    """
    if len(predictions) != len(targets) or not 0 < len(free) <= len(targets):
        raise LabError(f"fit: {len(free)} numbers to {len(targets)} figures; want at least as many figures")
    if unknown := set(free) - set(FREE):
        raise LabError(f"fit: no number {sorted(unknown)[0]!r}; there are {', '.join(FREE)}")

    def at(logarithms: np.ndarray) -> Efficiency:
        return replace(start, **dict(zip(free, np.exp(logarithms).tolist(), strict=True)))

    def misses(logarithms: np.ndarray) -> np.ndarray:
        efficiency = at(logarithms)
        return np.log([predict(efficiency) / target for predict, target in zip(predictions, targets, strict=True)])

    ends = [(_LOWEST[name], _HIGHEST_OVERHEAD if name == "overhead" else highest) for name in free]
    lows, highs = np.log(np.array(ends).T)
    begin = np.clip(np.log([max(getattr(start, name), 1e-9) for name in free]), lows + 1e-6, highs - 1e-6)
    # A roofline has kinks, where a component turns from memory to arithmetic: a search can stop at one, or go to and
    # fro across it. Several starts, a factor of ten away along each number, and the best of those that came to rest.
    shifts = [np.zeros(len(free)), *(_TEN * np.eye(len(free))), *(-_TEN * np.eye(len(free)))]
    ends_of = [
        least_squares(misses, np.clip(begin + shift, lows + 1e-6, highs - 1e-6), bounds=(lows, highs), xtol=1e-9)
        for shift in shifts
    ]
    found = min((end for end in ends_of if end.success), key=lambda end: end.cost, default=None)
    if found is None:
        raise LabError(f"fit: none of {len(ends_of)} searches converged ({ends_of[0].message})")
    return at(found.x)
