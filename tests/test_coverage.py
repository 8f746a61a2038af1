"""Distinct experts are counted as routers choose them, and independent routers meet the formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import SMALL

from dglab_utils.errors import LabError
from dglab_utils.measure.coverage import coverage, expected_experts
from dglab_utils.models import build, load
from dglab_utils.models.decoding import CanvasStepper, TokenStepper


@pytest.fixture(scope="module")
def model():
    return build(replace(SMALL, experts=16, experts_per_token=2))


def prompt(batch):
    return torch.randint(2, 190, (batch, 9), generator=torch.Generator().manual_seed(1))


def test_the_formula():
    assert expected_experts(128, 8, 1) == pytest.approx(8)
    assert expected_experts(128, 8, 256) == pytest.approx(128, abs=1e-4)
    assert expected_experts(1, 1, 5) == 1
    drawn = np.random.default_rng(0)
    counts = [np.unique([drawn.choice(16, 2, replace=False) for _ in range(5)]).size for _ in range(4000)]
    assert expected_experts(16, 2, 5) == pytest.approx(np.mean(counts), rel=0.01)


@pytest.mark.parametrize("batch", [1, 4])
def test_counts_of_both_ways(model, batch):
    token = coverage(model.model.encoder, TokenStepper(model, prompt(batch)).forward)
    canvas = coverage(model.model.decoder, CanvasStepper(model, prompt(batch)).forward)
    assert (token.experts, token.chosen, token.tokens) == (16, 2, batch)
    assert canvas.tokens == batch * 32
    assert len(token.distinct) == len(canvas.distinct) == SMALL.layers
    assert all(2 <= n <= min(16, 2 * batch) for n in token.distinct)
    assert all(n <= 16 for n in canvas.distinct)
    assert min(canvas.distinct) > max(token.distinct)


def test_one_token_uses_its_own_experts(model):
    assert coverage(model.model.encoder, TokenStepper(model, prompt(1)).forward).distinct == (2, 2)


def test_a_router_that_prefers_covers_less():
    model = build(replace(SMALL, experts=16, experts_per_token=2))
    even = coverage(model.model.decoder, CanvasStepper(model, prompt(1)).forward)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.router.proj.weight.zero_()  # every token's scores are equal: all choose the same two
    alike = coverage(model.model.decoder, CanvasStepper(model, prompt(1)).forward)
    assert alike.distinct == (2, 2)
    assert sum(even.distinct) > sum(alike.distinct)


def test_loaded_weights_count_as_they_did_before_they_were_saved(model, tmp_path):
    model.save_pretrained(tmp_path)
    made, loaded = (coverage(m.model.encoder, TokenStepper(m, prompt(4)).forward) for m in (model, load(tmp_path)))
    assert loaded == made


def test_nothing_to_count(model):
    with pytest.raises(LabError, match="Linear has no routers"):
        coverage(model.lm_head, lambda: None)
    with pytest.raises(LabError, match="0 router calls of 2 routers"):
        coverage(model.model.decoder, lambda: None)
