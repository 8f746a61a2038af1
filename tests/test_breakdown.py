"""The stamps partition a step, name the right component, and change nothing."""

from __future__ import annotations

import time

import pytest
import torch
from small import SMALL

from dglab_utils.measure import breakdown as module
from dglab_utils.measure.breakdown import COMPONENTS, breakdown
from dglab_utils.models import build
from dglab_utils.models.decoding import CanvasStepper, TokenStepper


@pytest.fixture(scope="module")
def model():
    return build(SMALL)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(2, 190, (1, 9), generator=torch.Generator().manual_seed(1))


def sleepy(model, monkeypatch, seconds, *names):
    """Modules of the first layer, or of the model, that take `seconds` longer than they do."""
    for name in names:
        for part in (model.model.decoder, model.model.encoder.language_model):
            target = model.lm_head if name == "lm_head" else getattr(part.layers[0], name, None) or getattr(part, name)
            forward = target.forward

            def slow(*args, _forward=forward, **kwargs):
                time.sleep(seconds)
                return _forward(*args, **kwargs)

            monkeypatch.setattr(target, "forward", slow)
            if name in ("lm_head", "self_conditioning"):
                break


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("self_attn", "attention"),
        ("mlp", "dense MLP"),
        ("router", "router and experts"),
        ("experts", "router and experts"),
        ("lm_head", "LM head"),
        ("self_conditioning", "self-conditioning"),
        ("input_layernorm", "rest"),
    ],
)
def test_time_lands_in_its_component(prompt, monkeypatch, name, component):
    model = build(SMALL)
    stepper = CanvasStepper(model, prompt)
    stepper.step()
    stepper.mark()
    sleepy(model, monkeypatch, 0.1, name)
    found = breakdown(model, stepper.step, before=stepper.rewind, rounds=2, warmup=0)
    assert (found.parts[component] >= 0.1).all()
    assert all((found.parts[other] < 0.1).all() for other in COMPONENTS if other != component)


def test_the_sampler_is_what_follows_the_head(model, prompt, monkeypatch):
    stepper = CanvasStepper(model, prompt)
    stepper.step()
    stepper.mark()
    accept = stepper.sampler.accept_canvas
    monkeypatch.setattr(stepper.sampler, "accept_canvas", lambda *args: time.sleep(0.1) or accept(*args))
    assert (breakdown(model, stepper.step, before=stepper.rewind, rounds=2, warmup=0).parts["sampler"] >= 0.1).all()


def test_a_token_has_no_self_conditioning(model, prompt):
    stepper = TokenStepper(model, prompt)
    found = breakdown(model, stepper.step, before=stepper.rewind, rounds=3, warmup=0)
    assert (found.parts["self-conditioning"] == 0).all()
    assert all((found.parts[c] > 0).all() for c in COMPONENTS if c != "self-conditioning")


def test_the_gap_compares_with_a_step_that_has_no_hooks(model, prompt, monkeypatch):
    """Hooks that cost 20 ms each show as a gap; a sum that were compared with itself would show none."""
    stepper = TokenStepper(model, prompt)
    enter = module._Timeline.enter
    monkeypatch.setattr(module._Timeline, "enter", lambda self, c: time.sleep(0.02) or enter(self, c))
    assert breakdown(model, stepper.step, before=stepper.rewind, rounds=2, warmup=0).summed.median > 2


def test_a_stamped_step_computes_the_same_and_leaves_no_hook(model, prompt):
    def denoised():
        torch.manual_seed(0)
        return CanvasStepper(model, prompt, max_denoising_steps=4).denoise()

    plain, entered = denoised(), []
    with module._stamping(model, entered.append):
        stamped = denoised()
    assert torch.equal(plain, stamped)
    assert set(entered) == set(COMPONENTS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_shares_add_up(model, prompt):
    stepper = TokenStepper(model, prompt)
    found = breakdown(model, stepper.step, before=stepper.rewind, rounds=2, warmup=0)
    total = sum(found.parts.values())
    assert sum(found.parts[c] / total for c in COMPONENTS) == pytest.approx([1, 1])
    assert 0 < found.share("attention") < 1
