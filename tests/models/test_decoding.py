"""The steppers do what `generate()` and a plain causal forward do, and return to where they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import NO_EOS, SMALL
from transformers import DynamicCache

from dglab_utils.errors import LabError
from dglab_utils.measure.timing import peak_memory
from dglab_utils.models import build, shape
from dglab_utils.models.decoding import CanvasStepper, TokenStepper, bytes_needed

# A window that the tests' contexts leave, and the static cache's sliding layers too.
WINDOWED = replace(SMALL, name="windowed", layers=3, sliding_window=12)


@pytest.fixture(scope="module")
def model():
    return build(WINDOWED)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(2, 190, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def uncompiled(monkeypatch):
    # Which functions run, over which cache, is what matters here; compiling them takes minutes.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def canvas_of_generate(model, prompt, **settings):
    torch.manual_seed(0)
    made = model.generate(prompt, max_new_tokens=32, return_dict_in_generate=True, **NO_EOS, **settings)
    return made.sequences[:, prompt.shape[1] :]


@pytest.mark.parametrize("compiled", [False, True])
def test_canvas_steps_make_the_canvas_of_generate(prompt, compiled, uncompiled):
    static = {"cache_implementation": "static"} if compiled else {}
    expected = canvas_of_generate(build(WINDOWED), prompt, max_denoising_steps=5, **static)
    torch.manual_seed(0)
    stepper = CanvasStepper(build(WINDOWED), prompt, adaptive=True, compiled=compiled, max_denoising_steps=5)
    assert torch.equal(stepper.denoise(), expected)
    assert stepper.remaining == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_canvas_follows_the_first(prompt, compiled, uncompiled):
    static = {"cache_implementation": "static"} if compiled else {}
    torch.manual_seed(0)
    made = build(WINDOWED).generate(
        prompt, max_new_tokens=64, max_denoising_steps=3, return_dict_in_generate=True, **NO_EOS, **static
    )
    torch.manual_seed(0)
    stepper = CanvasStepper(build(WINDOWED), prompt, adaptive=True, compiled=compiled, max_denoising_steps=3)
    first = stepper.denoise()
    stepper.append()
    stepper.begin()
    assert torch.equal(torch.cat([prompt, first, stepper.denoise()], dim=1), made.sequences)


def test_adaptive_stops_where_generate_stops_and_fixed_work_does_not(model, prompt):
    easy = {"max_denoising_steps": 9, "confidence_threshold": 100.0, "stability_threshold": 0}
    torch.manual_seed(0)
    adaptive = CanvasStepper(model, prompt, adaptive=True, **easy)
    assert torch.equal(adaptive.denoise(), canvas_of_generate(model, prompt, **easy))
    assert adaptive.remaining == 8
    fixed = CanvasStepper(model, prompt, adaptive=False, **easy)
    fixed.denoise()
    assert fixed.remaining == 0
    assert not fixed.finished.any()


def test_the_bound_of_this_stepper_counts_not_the_first_compiled_one(model, prompt, uncompiled):
    tight_bound, loose_bound = (model._prepare_generation_config(None)[0].sampler_config for _ in range(2))
    loose_bound.entropy_bound = 1e6
    shared, accepted = build(WINDOWED), []
    for bound in (tight_bound, loose_bound):
        stepper = CanvasStepper(shared, prompt, compiled=True, sampler_config=bound)
        stepper.step()
        accepted.append(int(stepper.sampler.accepted_token_mask.sum()))
    assert accepted[1] == prompt.shape[0] * WINDOWED.canvas_length > accepted[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_token_logits_are_those_of_one_causal_forward(model, prompt, compiled, uncompiled):
    stepper = TokenStepper(model, prompt, temperature=0, compiled=compiled)
    stepped, tokens = [], [prompt]
    for _ in range(8):
        stepper.mark()
        stepped.append(stepper.forward())
        stepper.rewind()
        tokens.append(stepper.step()[:, None])
    whole = torch.cat(tokens[:-1], dim=1)
    with torch.no_grad():
        hidden = model.model.encoder(input_ids=whole, cache=DynamicCache(config=model.config.text_config))
        logits = 30 * torch.tanh(model.lm_head(hidden.last_hidden_state) / 30)
    assert model.final_logit_softcapping == 30
    torch.testing.assert_close(torch.stack(stepped, dim=1), logits[:, prompt.shape[1] - 1 :], atol=2e-5, rtol=1e-4)


def test_scopes_are_nested(model, prompt):
    canvas, token = CanvasStepper(model, prompt), TokenStepper(model, prompt)
    canvas.step()
    for stepper, shape_of_body in ((canvas, (2, 32, 64)), (token, (2, 1, 64))):
        stepper.mark()
        body = stepper.body()
        assert body.shape == shape_of_body
        stepper.rewind()
        logits = stepper.forward()
        capped = 30 * torch.tanh(model.lm_head(body) / 30)
        torch.testing.assert_close(logits.reshape(capped.shape), capped)
        stepper.rewind()


@pytest.mark.parametrize("compiled", [False, True])
def test_rewound_steps_repeat_themselves(model, prompt, compiled, uncompiled):
    canvas, token = CanvasStepper(model, prompt, compiled=compiled), TokenStepper(model, prompt, compiled=compiled)
    canvas.step()
    for _ in range(6):  # into the window
        token.step()
    for stepper in (canvas, token):
        stepper.mark()
        torch.manual_seed(3)
        first = stepper.forward().clone(), stepper.step().clone()
        stepper.rewind()
        torch.manual_seed(3)
        again = stepper.forward().clone(), stepper.step().clone()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_canvas_is_appended_and_taken_back(model, prompt):
    stepper = CanvasStepper(model, prompt)
    stepper.step()
    stepper.mark()
    stepper.append()
    assert stepper.cache.get_seq_length() == 9 + 32
    stepper.rewind()
    assert stepper.cache.get_seq_length() == 9


def test_greedy_and_drawn_tokens(model, prompt):
    greedy = TokenStepper(model, prompt, temperature=0)
    logits = greedy.forward()
    greedy.rewind()
    assert torch.equal(greedy.step(), logits.argmax(dim=-1))
    assert greedy.length == prompt.shape[1]


@pytest.mark.parametrize(("batch", "context", "vocab"), [(1, 8, 4000), (3, 64, 2000), (1, 200, 200)])
def test_memory_is_foreseen_from_above_and_not_far_from_it(batch, context, vocab):
    sized = replace(shape("toy-1m"), canvas_length=64, vocab=vocab, max_positions=512)
    needed = bytes_needed(sized.config(), batch=batch, context=context)

    def run():
        stepper = CanvasStepper(build(sized), torch.ones(batch, context, dtype=torch.long))
        stepper.step(), stepper.step()

    assert peak_memory(run) <= needed < 3 * peak_memory(run)


def test_the_step_holds_eight_vocabulary_sized_buffers(prompt):
    stepper = CanvasStepper(build(replace(SMALL, vocab=20_000)), prompt)
    stepper.step()
    buffers = peak_memory(stepper.step) / (2 * 32 * 20_000 * 4)
    assert 6.5 < buffers <= 8.5


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m: CanvasStepper(m, torch.ones(4, dtype=torch.long)), r"prompt of shape \[4\]"),
        (lambda m: TokenStepper(m, torch.ones(1, 1, dtype=torch.long)), "2 tokens or more"),
        (lambda m: CanvasStepper(m, torch.ones(1, 500, dtype=torch.long)), "room for 480 before a canvas"),
        (lambda m: TokenStepper(m, torch.ones(1, 4, dtype=torch.long), temperature=-1.0), "temperature -1.0"),
        (lambda m: CanvasStepper(m, torch.ones(1, 4, dtype=torch.long), nonsense=1), "no setting 'nonsense'"),
        (lambda m: CanvasStepper(m, torch.ones(1, 4, dtype=torch.long), max_denoising_steps=0), "positive integer"),
    ],
)
def test_bad_requests(model, call, told):
    with pytest.raises(LabError, match=told):
        call(model)


def test_a_canvas_ends_at_its_cap(model, prompt):
    stepper = CanvasStepper(model, prompt, max_denoising_steps=1)
    stepper.step()
    with pytest.raises(LabError, match="all 1 steps of this canvas are taken"):
        stepper.step()
