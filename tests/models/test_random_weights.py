"""A model filled in place is what `build` makes, but for the draws."""

from __future__ import annotations

import pytest
import torch
from small import SMALL

from dglab_utils.errors import LabError
from dglab_utils.models import build
from dglab_utils.models.random_weights import build_in_place, config_of, scaled
from dglab_utils.report.reference import reference


@pytest.fixture(scope="module")
def pair():
    return build_in_place(SMALL.config(), dtype="bfloat16"), build(SMALL, dtype="bfloat16")


def test_parameters_are_tied_and_spread_alike(pair):
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in pair)
    assert ours.keys() == theirs.keys()
    assert len({id(p) for p in ours.values()}) == len({id(p) for p in theirs.values()})
    for name, parameter in ours.items():
        assert parameter.dtype == theirs[name].dtype
        if "vision" in name:
            continue
        a, b = parameter.detach().float(), theirs[name].detach().float()
        assert torch.isfinite(a).all(), name
        assert float(a.mean()) == pytest.approx(float(b.mean()), abs=0.01), name
        assert float(a.std(correction=0)) == pytest.approx(float(b.std(correction=0)), rel=0.3, abs=1e-6), name


def test_buffers_of_the_text_model_are_equal(pair):
    ours, theirs = (dict(m.named_buffers()) for m in pair)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if "vision" not in name:
            assert ours[name].dtype == theirs[name].dtype, name
            assert torch.equal(ours[name], theirs[name]), name


def test_it_generates(pair):
    prompt = torch.ones(1, 5, dtype=torch.long)
    out = pair[0].generate(prompt, max_new_tokens=32, max_denoising_steps=2, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 5 + 32)


def test_the_random_state_is_left_alone():
    state = torch.get_rng_state()
    build_in_place(SMALL.config(), dtype="float32")
    assert torch.equal(state, torch.get_rng_state())


def test_released_sizes_become_the_official_configuration():
    sizes = reference("model_shapes")["diffusiongemma-26B-A4B"]
    text = config_of(sizes).text_config
    full = [i for i, kind in enumerate(text.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29]
    assert [text.per_layer_config[i].head_dim for i in (0, 5)] == [256, 512]
    assert [text.per_layer_config[i].num_key_value_heads for i in (0, 5)] == [8, 2]


def test_sizes_that_make_no_configuration():
    sizes = reference("model_shapes")["diffusiongemma-26B-A4B"]
    with pytest.raises(LabError, match="hidden is missing"):
        config_of({name: size for name, size in sizes.items() if name != "hidden"})
    with pytest.raises(LabError, match="7 full layers; the official order gives 5"):
        config_of({**sizes, "sliding_layers": 23, "full_layers": 7})


def test_a_scaled_copy_keeps_the_ratios():
    whole = reference("model_shapes")["diffusiongemma-26B-A4B"]
    assert scaled(whole, 1) == whole
    small = scaled(whole, 8, layers=6)
    assert {n: whole[n] / small[n] for n in ("hidden", "mlp_width", "vocab", "heads", "kv_heads")} == dict.fromkeys(
        ("hidden", "mlp_width", "vocab", "heads", "kv_heads"), 8
    )
    kept = ("experts", "experts_per_token", "head_dim", "full_head_dim", "sliding_window", "canvas_length")
    assert {n: small[n] for n in kept} == {n: whole[n] for n in kept}
    assert (small["sliding_layers"], small["full_layers"], small["full_kv_heads"]) == (5, 1, 1)
    assert small["expert_width"] == 96  # 88, in sixteens
    assert scaled(whole, 2)["sliding_layers"] + scaled(whole, 2)["full_layers"] == 12  # 15, in sixes
    config_of(scaled(whole, 64, layers=6))


def test_what_cannot_be_scaled():
    whole = reference("model_shapes")["diffusiongemma-26B-A4B"]
    for divisor in (0, 3, 5):
        with pytest.raises(LabError, match=f"divisor {divisor}: want one that divides"):
            scaled(whole, divisor)
    with pytest.raises(LabError, match="sizes: hidden is missing"):
        scaled({}, 2)
