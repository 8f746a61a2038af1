"""A measurement: one figure with its spread. A figure without its spread is not published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dglab_utils.errors import LabError


@dataclass(frozen=True)
class Measurement:
    """Median and quartiles of samples of one quantity.

    Attributes:
        name: what was measured, such as `steps` or `canvas_step`.
        unit: its unit, such as `ms`, `nats`, `steps`; "" for a pure number.
        median, q1, q3: of the samples; q1 and q3 are the quartiles (linear interpolation).
        count: of the samples.
        labels: what it was measured on, plain values, such as `{"growth": 0.5}`.
        timed: a duration or derived from one. Everything else must come out equal on every run.
    """

    name: str
    unit: str
    median: float
    q1: float
    q3: float
    count: int
    labels: dict[str, Any] = field(default_factory=dict)
    timed: bool = False

    @classmethod
    def of(cls, name: str, unit: str, samples: Sequence[float], *, timed: bool = False, **labels: Any) -> Measurement:
        """The measurement of these samples.

        Raises:
            LabError: no samples, or one that is not finite.
        """
        values = np.asarray(samples, dtype=np.float64)
        if values.size == 0 or not np.isfinite(values).all():
            raise LabError(f"measurement {name} {labels}: {values.size} samples, all must be finite and at least one")
        q1, median, q3 = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
        return cls(name, unit, median, q1, q3, int(values.size), labels, timed)
