"""The named shapes are the first lab's, to the parameter, and a seed names one model."""

from __future__ import annotations

import pytest
import torch

from dglab_utils.errors import LabError
from dglab_utils.models import SHAPES, build, count_parameters, load, shape


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("toy-1m", 0.95),
        ("toy-17m", 16.9),
        ("toy-48m", 48.5),
        ("toy-69m", 69.3),
        ("toy-97m", 97.1),
        ("toy-196m", 196.4),
        ("toy-336m", 335.6),
    ],
)
def test_published_sizes(name, millions):
    digits = 2 if millions < 1 else 1
    assert round(count_parameters(name) / 1e6, digits) == millions


def test_counting_allocates_nothing_and_is_right():
    assert count_parameters("toy-1m") == sum(p.numel() for p in build("toy-1m").parameters())


@pytest.mark.parametrize(("experts", "total", "chosen"), [("dense", 1, 1), ("8/2", 8, 2), ("128/8", 128, 8)])
def test_expert_variants(experts, total, chosen):
    base, variant = shape("toy-17m"), shape(f"toy-17m:{experts}")
    assert (variant.experts, variant.experts_per_token) == (total, chosen)
    one = 3 * base.hidden * base.expert_width + base.hidden + 1  # weights, and its part of the router
    assert count_parameters(variant) - count_parameters(base) == base.layers * (total - base.experts) * one


@pytest.mark.parametrize("experts", ["dense", "8/2", "128/8"])
def test_variants_run(experts):
    model = build(f"toy-1m:{experts}")
    out = model.generate(torch.ones(1, 3, dtype=torch.long), max_denoising_steps=1, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 259)


def test_a_seed_names_a_model_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    first, again, other = (build("toy-1m", seed=s).lm_head.weight for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_bfloat16_is_what_a_checkpoint_gives(tmp_path):
    """Rotary frequencies stay in float32, as `from_pretrained` keeps them; `.to(bfloat16)` would round them."""
    build("toy-1m").save_pretrained(tmp_path)
    ours, loaded = build("toy-1m", dtype="bfloat16"), load(tmp_path, dtype="bfloat16")
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(loaded, kind)())
        for name, tensor in getattr(ours, kind)():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name
    assert ours.model.decoder.rotary_emb.sliding_attention_inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: shape("toy-17"), "no shape 'toy-17': did you mean toy-17m"),
        (lambda: shape("toy-17m:8x2"), "'dense' or 'E/k'"),
        (lambda: shape("toy-17m:2/8"), "between 1 and all 2 experts"),
        (lambda: build("toy-1m", dtype="int8"), "dtype 'int8'"),
        (lambda: build("toy-1m", dtype="nonsense"), "dtype 'nonsense'"),
        (lambda: build("toy-1m", device="gpu"), "device 'gpu'"),
        (lambda: build("toy-1m", device="cuda:99"), "not on this machine"),
    ],
)
def test_bad_requests(call, told):
    with pytest.raises(LabError, match=told):
        call()


def test_every_shape_has_the_lab_canvas():
    assert {s.canvas_length for s in SHAPES.values()} == {256}
