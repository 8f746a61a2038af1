"""Costs of both ways of decoding, the speedup that follows, and sweeps that meet the end of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import SMALL

from dglab_utils.errors import LabError
from dglab_utils.measure import speed
from dglab_utils.measure.speed import WORKS, Cell, hollow, speedup, step_costs, sweep, works
from dglab_utils.models import build, shape
from dglab_utils.models.random_weights import config_of, scaled
from dglab_utils.report.reference import reference


@pytest.fixture(scope="module")
def model():
    return build(SMALL)


def test_every_work_is_timed(model):
    costs = step_costs(model, rounds=3, warmup=0, names=WORKS, context=9)
    assert list(costs) == list(WORKS)
    assert all(times.shape == (3,) and (times > 0).all() for times in costs.values())


def test_works_repeat_themselves(model):
    """A token's context does not grow from run to run, and neither a canvas's."""
    found = works(model, names=WORKS, batch=2, context=9)
    for name in ("token step", "token body", "append", "canvas step"):
        work = found[name]
        for _ in range(3):
            work.before()
            work.run()
        stepper = work.run.__self__
        work.before()
        assert stepper.cache.get_seq_length() == 9


def test_speedup_is_the_published_arithmetic():
    canvas, token = np.array([51.52]), np.array([40.528])  # the first lab's milliseconds
    assert [round(float(speedup(n, canvas, token)[0]), 2) for n in (12, 16, 48)] == [16.78, 12.59, 4.2]
    assert speedup(16, canvas, token, append=canvas)[0] == pytest.approx(256 * 40.528 / (17 * 51.52))


def test_a_hollow_model_keeps_its_layers_and_runs():
    full, empty = shape("toy-69m"), hollow(shape("toy-69m"))
    assert (empty.layers, empty.experts, empty.experts_per_token) == (full.layers, full.experts, full.experts_per_token)
    costs = step_costs(build(replace(empty, layers=2)), rounds=2, warmup=0, names=("canvas step", "token step"))
    assert all((times > 0).all() for times in costs.values())


def test_bad_requests(model):
    with pytest.raises(LabError, match="no work 'tea'"):
        works(model, names=["tea"])
    with pytest.raises(LabError, match="batch 0, context 64"):
        works(model, batch=0)
    with pytest.raises(LabError, match="context 1"):
        works(model, context=1)


def test_a_sweep_goes_on_after_a_cell_that_does_not_fit(monkeypatch):
    small = Cell(SMALL, context=9)
    large = Cell(SMALL, batch=1000, context=9)
    monkeypatch.setattr("dglab_utils.measure.timing.free_memory", lambda device: 300_000_000)
    # Nothing of the large cell may be allocated: its first tensor would be its prompt.
    asked = []
    monkeypatch.setattr(speed, "step_costs", lambda model, **kwargs: asked.append(kwargs["batch"]) or {})
    first, refused, last = sweep([small, large, small], rounds=2)
    assert asked == [1, 1]
    assert first.costs == last.costs == {}
    assert refused.costs is None
    assert "small at batch 1000, context 9 needs" in refused.refused
    assert "300,000,000 are free" in refused.refused


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_cell_that_runs_out_of_memory_is_marked(monkeypatch, error):
    def costs(model, **kwargs):
        if kwargs["batch"] == 2:
            raise error
        return {"canvas step": np.ones(2)}

    monkeypatch.setattr(speed, "step_costs", costs)
    found = list(sweep([Cell(SMALL, batch=n, context=9) for n in (1, 2, 3)], rounds=2))
    assert [m.costs is None for m in found] == [False, True, False]
    assert found[1].refused == "ran out of memory"


def test_a_configuration_is_a_shape_too():
    (found,) = sweep([Cell(SMALL.config(), context=9)], rounds=2, warmup=0, dtype="bfloat16")
    assert found.costs.keys() == {"canvas step", "token step"}


def test_configurations_that_differ_from_layer_to_layer_follow_one_another():
    """The released shape has heads of two widths, and its configuration refuses to be compared."""
    sizes = scaled(reference("model_shapes")["diffusiongemma-26B-A4B"], 64, layers=6)
    cells = [Cell(config_of(sizes | {"vocab": vocab}), context=4) for vocab in (64, 128)]
    assert cells[0].shape.text_config.per_layer_config[0].head_dim == 256
    assert all(found.costs for found in sweep(cells, rounds=2, warmup=0, names=["token step"]))


def test_other_errors_end_a_sweep(monkeypatch):
    def costs(model, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(speed, "step_costs", costs)
    with pytest.raises(RuntimeError, match="shapes"):
        list(sweep([Cell(SMALL)], rounds=2))


def test_a_real_allocation_that_fails_is_recognised():
    from dglab_utils.measure.timing import unless_out_of_memory

    assert unless_out_of_memory(lambda: torch.empty(2**52)) is None
    assert unless_out_of_memory(lambda: 3) == 3
