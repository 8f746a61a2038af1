"""Pairs and their ratio; no test here looks at a clock."""

from __future__ import annotations

import numpy as np
import pytest

from dglab_utils.errors import LabError
from dglab_utils.measure.timing import interleaved, ratio


def test_runs_take_turns():
    calls: list[str] = []
    a, b = interleaved(lambda: calls.append("a"), lambda: calls.append("b"), pairs=3, warmup=1)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert a.shape == b.shape == (3,)
    assert (a > 0).all()


def test_the_ratio_is_taken_pair_by_pair():
    b = np.array([1.0, 10.0, 100.0, 1000.0, 3.0])  # a machine whose speed drifts
    found = ratio(1.2 * b, b)
    assert (found.median, found.low, found.high) == pytest.approx((1.2, 1.2, 1.2))


def test_the_interval_covers_the_truth():
    covered = 0
    for seed in range(200):
        noise = np.random.default_rng(seed)
        b = noise.lognormal(0, 0.5, 25)
        found = ratio(1.1 * b * noise.lognormal(0, 0.1, 25), b, draws=500)
        covered += found.low <= 1.1 <= found.high
    assert 0.9 <= covered / 200 <= 0.99


def test_an_interval_needs_pairs():
    with pytest.raises(LabError, match="at least 2"):
        interleaved(lambda: None, lambda: None, pairs=1)
    with pytest.raises(LabError, match="as many of each"):
        ratio(np.ones(3), np.ones(2))
