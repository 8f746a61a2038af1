"""The ramp meets the first lab's figures, and nothing but its pull makes the bound matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dglab_utils.errors import LabError
from dglab_utils.sampling.from_scratch import accept
from dglab_utils.sampling.ramp import ConfidenceRamp, run_ramp


@pytest.mark.parametrize(("growth", "steps"), [(0.5, 31), (1.0, 18), (2.0, 10), (4.0, 6)])
def test_first_lab_growth(growth, steps):
    trace = run_ramp(ConfidenceRamp(growth=growth))
    assert trace.steps == steps
    assert trace.stopped
    assert np.array_equal(trace.output, ConfidenceRamp().targets.numpy())


@pytest.mark.parametrize(("bound", "accepted"), [(0.01, 29.1), (0.1, 45.9), (1.0, 67.2), (10.0, 90.4)])
def test_first_lab_bound(bound, accepted):
    trace = run_ramp(ConfidenceRamp(), entropy_bound=bound)
    assert round(trace.commits_per_forward, 1) == accepted
    assert trace.steps == 18


def test_first_lab_difficulties():
    # The first values of its results file.
    assert [round(d, 4) for d in ConfidenceRamp().difficulty[:4].tolist()] == [0.0044, 0.7257, 0.2599, 0.1663]


def test_the_mask_is_the_rule_of_its_logits():
    trace = run_ramp(ConfidenceRamp(canvas_length=64, vocab_size=100), entropy_bound=0.5, keep_logits=True)
    assert np.array_equal(trace.accepted, accept(torch.from_numpy(trace.logits), 0.5).numpy())
    assert trace.settings["entropy_bound"] == 0.5


def test_without_pull_the_draws_decide_nothing_but_themselves():
    first, second = (run_ramp(ConfidenceRamp(), seed=seed) for seed in (1, 2))
    assert first.digest_of("accepted") == second.digest_of("accepted")
    assert first.digest_of("entropy") == second.digest_of("entropy")
    assert first.digest_of("current") != second.digest_of("current")


def test_with_pull_a_looser_bound_stops_sooner():
    ramp = ConfidenceRamp(growth=0.5, pull=16, canvas_length=128, vocab_size=200)
    tight, loose = (run_ramp(ramp, entropy_bound=bound).steps for bound in (0.01, 10.0))
    assert loose < tight


def test_the_canvas_does_not_start_at_the_answer():
    for seed in range(3):
        trace = run_ramp(ConfidenceRamp(seed=seed), seed=seed)
        hits = (trace.current[0] == ConfidenceRamp(seed=seed).targets.numpy()).sum()
        assert hits <= 4, "256 draws from 1,000 tokens hit their target by chance 0.26 times"


def test_support_counts_neighbours():
    ramp = ConfidenceRamp(canvas_length=6, vocab_size=50, reach=2)
    canvas = torch.where(torch.arange(6) == 2, ramp.targets, ramp.targets + 1)
    # Position 2 is right: its neighbours at distance 1 and 2 see it, among 2, 3, 4, 4, 3, 2 neighbours.
    expected = [1 / 2, 1 / 3, 0, 1 / 4, 1 / 3, 0]
    assert ramp.support(canvas).tolist() == pytest.approx(expected)


def test_equal_seeds_give_equal_traces_and_leave_the_generator_alone():
    state = torch.get_rng_state()
    ramp = ConfidenceRamp(canvas_length=32, vocab_size=50)
    assert run_ramp(ramp, seed=4).digest() == run_ramp(ramp, seed=4).digest()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"entropy_bound": 0}, "entropy_bound"),
        ({"entropy_bound": -1.0}, "entropy_bound"),
        ({"max_denoising_steps": 0}, "max_denoising_steps"),
        ({"confidence_threshold": 0.0}, "confidence_threshold"),
        ({"stability_threshold": -1}, "stability_threshold"),
        ({"t_min": 0.8}, "t_max"),
        ({"entropy_bound": math.nan}, "entropy_bound=nan: want a finite number"),
        ({"confidence_threshold": math.nan}, "confidence_threshold=nan"),
        ({"t_max": math.inf}, "t_max=inf"),
        ({"max_denoising_steps": True}, "max_denoising_steps=True"),
        ({"t_min": None}, "t_min=None"),
        ({"seed": -1}, "seeds are integers from 0"),
    ],
)
def test_bad_settings(setting, told):
    with pytest.raises(LabError, match=told):
        run_ramp(ConfidenceRamp(canvas_length=8, vocab_size=10), **setting)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ({"canvas_length": 0}, "canvas_length=0: want at least 1"),
        ({"vocab_size": 1}, "vocab_size=1: want at least 2"),
        ({"growth": math.nan}, "growth=nan"),
        ({"pull": -1.0}, "pull=-1.0"),
        ({"pull": 2.0, "reach": 0}, "reach=0"),
        ({"pull": 2.0, "canvas_length": 1}, "want 0 on a canvas of one position"),
    ],
)
def test_bad_ramps(shape, told):
    with pytest.raises(LabError, match=told):
        ConfidenceRamp(**shape)


def test_unusable_logits_are_named():
    class Spoilt(ConfidenceRamp):
        def logits(self, elapsed, canvas):
            logits = super().logits(elapsed, canvas)
            if elapsed == 1:
                logits[3] = math.nan
            return logits

    with pytest.raises(LabError, match=r"logits of step 1: NaN at row 0, position 3 \(1 positions"):
        run_ramp(Spoilt(canvas_length=8, vocab_size=10))
