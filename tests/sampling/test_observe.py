"""`observe` sees everything and changes nothing."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from small import NO_EOS, SMALL, generate, scripted, sure_after
from transformers import StaticCache

from dglab_utils.errors import LabError
from dglab_utils.models import build
from dglab_utils.sampling.from_scratch import CACHE, accept
from dglab_utils.sampling.observe import observe


def traced(model, prompts, *, seed=0, keep_logits=False, **settings):
    with observe(model, seed=seed, keep_logits=keep_logits) as traces:
        output = generate(model, prompts, seed=seed, **settings)
    return output, traces


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 32},
        {"max_new_tokens": 90},
        {"max_new_tokens": 128, "eos_token_id": 7},
        {"max_new_tokens": 128, "eos_token_id": [7, 8, 9, 10, 11]},
        {"max_new_tokens": 32, "stability_threshold": 0, "confidence_threshold": 6.0},
        {"max_new_tokens": 64, "stability_threshold": 3, "confidence_threshold": 6.0},
        {"max_new_tokens": 32, "max_denoising_steps": 1},
    ],
)
def test_traced_equals_untraced(model, prompts, settings):
    plain = generate(model, prompts, seed=3, **settings)
    state = torch.get_rng_state()
    seen, traces = traced(model, prompts, seed=3, **settings)
    assert torch.equal(plain.sequences, seen.sequences)
    assert torch.equal(plain.tokens_per_forward, seen.tokens_per_forward)
    assert torch.equal(state, torch.get_rng_state()), "tracing drew random numbers of its own"
    assert traces


def test_traced_equals_untraced_in_bfloat16(prompts):
    model = build(SMALL, dtype="bfloat16")
    plain = generate(model, prompts, seed=3, max_new_tokens=64)
    seen, traces = traced(model, prompts, seed=3, max_new_tokens=64)
    assert torch.equal(plain.sequences, seen.sequences)
    assert traces[0].dtype == "bfloat16"


def test_one_trace_a_canvas_and_row(model, prompts):
    output, traces = traced(model, prompts, max_new_tokens=90)
    assert [(t.canvas, t.row) for t in traces] == [(c, r) for c in range(3) for r in range(3)]
    generated = output.sequences[:, prompts.shape[1] :]
    for t in traces:
        assert t.output.tolist() == generated[t.row, t.canvas * 32 : (t.canvas + 1) * 32].tolist()
        assert t.prompt.tolist() == prompts[t.row].tolist()
        assert (t.steps, t.canvas_length, t.seed, t.model) == (8, 32, 0, "small@0")
        assert t.settings["entropy_bound"] == 0.1
        assert t.settings["vocab_size"] == 200


def test_arrays_fit_together(model, prompts):
    _, (trace, *_) = traced(model, prompts[:1], max_new_tokens=32)
    # An accepted candidate is what the next step reads; the last argmax is the answer.
    for s in range(trace.steps - 1):
        kept = trace.accepted[s]
        assert np.array_equal(trace.current[s + 1][kept], trace.sampled[s][kept])
    assert np.array_equal(trace.argmax[-1], trace.output)
    assert np.allclose(trace.temperature, [0.4 + 0.4 * n / 8 for n in range(8, 0, -1)])
    assert np.allclose(trace.mean_entropy, trace.entropy.mean(axis=1), atol=1e-5)
    assert trace.current.dtype == np.int32
    assert trace.current.min() >= 0
    assert trace.current.max() < 200


def test_entropy_and_mask_follow_from_the_logits(model, prompts):
    _, traces = traced(model, prompts, max_new_tokens=32, keep_logits=True)
    for t in traces:
        log_p = t.logits.astype(np.float64)
        log_p -= np.logaddexp.reduce(log_p, axis=-1, keepdims=True)
        assert np.allclose(t.entropy, -(np.exp(log_p) * log_p).sum(axis=-1), atol=1e-5)
        assert np.array_equal(t.accepted, accept(torch.from_numpy(t.logits), 0.1).numpy())
        assert np.array_equal(t.argmax, t.logits.argmax(axis=-1))
        assert np.allclose(t.kl_to_final[-1], 0)
        assert (t.kl_to_final > -1e-12).all()
        assert t.kl_to_final[0].max() > 0


def test_rows_that_finish_at_different_steps(model, prompts):
    script = scripted(sure_after(1, 4, 20), 8)
    _, traces = traced(model, prompts, max_new_tokens=32, logits_processor=script)
    # Sure at step e (from 0) means: the argmax changes at e, is stable at e + 1, and the row has taken e + 2 steps.
    assert [(t.steps, t.stopped) for t in traces] == [(3, True), (6, True), (8, False)]
    assert [int(t.stable[-1]) for t in traces] == [1, 1, 1]
    for row, trace in enumerate(traces[:2]):
        assert trace.output.tolist() == list(range(20 + 40 * row, 52 + 40 * row))
        assert trace.confident.tolist() == [s >= trace.steps - 2 for s in range(trace.steps)]
        assert trace.stable[-2:].tolist() == [False, True]


def test_stragglers_do_not_change_a_finished_row(model, prompts):
    script = scripted(sure_after(0, 6, 6), 8)
    plain = generate(model, prompts, max_new_tokens=64, logits_processor=script)
    seen, traces = traced(model, prompts, max_new_tokens=64, logits_processor=script)
    assert torch.equal(plain.sequences, seen.sequences)
    assert [t.steps for t in traces] == [2, 8, 8] * 2


def test_canvases_after_the_end(model, prompts):
    # Row 0 is sure of tokens 20 .. 51, so that an EOS of 30 ends it in its first canvas; the others never meet one.
    script = scripted(sure_after(0, 0, 0), 8)
    output, traces = traced(model, prompts, max_new_tokens=64, eos_token_id=30, logits_processor=script)
    first, later = (next(t for t in traces if (t.row, t.canvas) == (0, canvas)) for canvas in (0, 1))
    assert later.ended_before
    assert not first.ended_before
    assert set(later.output.tolist()) == {0}
    assert math.isnan(later.official_tokens_per_forward)
    counted = [t for t in traces if t.row == 0 and not t.ended_before]
    kept, steps = sum(int((t.output != 0).sum()) for t in counted), sum(t.steps for t in counted)
    assert float(output.tokens_per_forward[0]) == pytest.approx(kept / steps)


def test_left_padded_rows(model, prompts):
    mask = torch.ones_like(prompts)
    mask[1, :5] = 0
    plain = generate(model, prompts, seed=2, attention_mask=mask, max_new_tokens=64)
    seen, traces = traced(model, prompts, seed=2, attention_mask=mask, max_new_tokens=64)
    assert torch.equal(plain.sequences, seen.sequences)
    assert traces[1].prompt.tolist() == prompts[1, 5:].tolist()
    assert traces[0].prompt.tolist() == prompts[0].tolist()


def test_flat_logits_accept_one_a_step(model, prompts):
    flat = scripted(lambda _, logits: logits.zero_(), 8)
    _, traces = traced(model, prompts, max_new_tokens=32, logits_processor=flat)
    for t in traces:
        assert t.commits_per_step.tolist() == [1] * 8
        assert np.allclose(t.entropy, math.log(200))


def test_banned_tokens_are_legitimate(model, prompts):
    def ban(_, logits):
        logits[..., :100] = -math.inf
        return logits

    _, traces = traced(model, prompts, max_new_tokens=32, logits_processor=scripted(ban, 8), keep_logits=True)
    for t in traces:
        assert t.sampled.min() >= 100
        assert np.isfinite(t.entropy).all()
        assert np.isfinite(t.kl_to_final).all()


@pytest.mark.parametrize(
    ("value", "told"), [(math.nan, "NaN at row 1, position 4"), (-math.inf, "infinite at row 1, position 4")]
)
def test_unusable_logits_are_named(model, prompts, value, told):
    def spoil(elapsed, logits):
        if elapsed == 2:
            logits[1, 4] = value
        return logits

    with pytest.raises(LabError, match=told) as caught, observe(model):
        generate(model, prompts, max_new_tokens=32, logits_processor=scripted(spoil, 8))
    assert str(caught.value).startswith("logits of step 2: ")
    assert "_prepare_sampler" not in vars(model)


def test_other_errors_pass_through(model):
    with pytest.raises(RuntimeError, match="mine"), observe(model):
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("shape", "settings", "told"),
    [
        ((1, 0), {}, "prompt is empty"),
        ((1, 40), {"max_length": 40, "max_new_tokens": 256}, "leaves no room under max_length=40"),
        ((1, 500), {}, "512 positions"),
    ],
)
def test_bad_prompts(model, shape, settings, told):
    with pytest.raises(LabError, match=told), observe(model):
        generate(model, torch.ones(shape, dtype=torch.long), **settings)


def test_prompt_longer_than_the_cache(model, prompts):
    cache = StaticCache(config=model.config.text_config, max_cache_len=4)
    eager = hasattr(model.generation_config, "disable_compile")
    told = "cache: holds 4 tokens, the prompt has 9" if eager else "a compiled loop cannot be observed"
    settings = {"disable_compile": True} if eager else {}
    with pytest.raises(LabError, match=told), observe(model):
        generate(model, prompts, **{CACHE: cache}, **settings)


def test_compiled_loops_are_refused(model, prompts):
    with pytest.raises(LabError, match="compiled loop cannot be observed"), observe(model):
        generate(model, prompts, cache_implementation="static")


def test_contexts_do_not_nest_and_leave_nothing_behind(model, prompts):
    before = set(vars(model))
    with observe(model), pytest.raises(LabError, match="already being observed"), observe(model):
        pass
    with observe(model) as traces:
        generate(model, prompts, max_new_tokens=32)
    assert set(vars(model)) - before <= {"_cache"}
    generate(model, prompts, max_new_tokens=32)
    assert len(traces) == 3


def test_only_diffusion_gemma_can_be_observed():
    with (
        pytest.raises(LabError, match=r"Linear has no _prepare_\w+: give a DiffusionGemma"),
        observe(torch.nn.Linear(1, 1)),
    ):
        pass


def test_a_prompt_longer_than_the_sliding_window(model):
    """Sliding layers keep 128 tokens; the dynamic cache has no limit for that."""
    long = torch.randint(2, 190, (2, 300), generator=torch.Generator().manual_seed(2))
    plain = generate(model, long, seed=1, max_new_tokens=64)
    seen, traces = traced(model, long, seed=1, max_new_tokens=64)
    assert torch.equal(plain.sequences, seen.sequences)
    assert traces[0].prompt.tolist() == long[0].tolist()


def test_a_second_turn_with_the_cache_of_the_first(model, prompts):
    def turns(watch):
        first = generate(model, prompts[:1], seed=1, max_new_tokens=32)
        more = torch.cat([first.sequences[:, -32:], prompts[1:2]], dim=-1)
        with watch() as traces:
            second = generate(model, more, seed=2, max_new_tokens=32, **{CACHE: getattr(first, CACHE)})
        return second.sequences, traces, more

    plain, _, _ = turns(contextlib.nullcontext)
    seen, traces, more = turns(lambda: observe(model))
    assert torch.equal(plain, seen)
    assert traces[0].prompt.tolist() == more[0].tolist()


@pytest.mark.parametrize("off", [{"t_min": None}, {"stability_threshold": None}, {"confidence_threshold": None}])
def test_parts_that_are_switched_off(model, prompts, off):
    plain = generate(model, prompts, seed=1, max_new_tokens=32, **off)
    seen, traces = traced(model, prompts, seed=1, max_new_tokens=32, **off)
    assert torch.equal(plain.sequences, seen.sequences)
    assert np.isnan(traces[0].temperature).all() == ("t_min" in off)
    assert not any(t.stopped for t in traces)
    assert np.allclose(traces[0].mean_entropy, traces[0].entropy.mean(axis=1), atol=1e-5)


def test_without_a_stability_threshold_every_step_is_stable(model, prompts):
    _, traces = traced(model, prompts, max_new_tokens=32, stability_threshold=0)
    assert all(t.stable.all() for t in traces)


def test_other_padding(model, prompts):
    script = scripted(sure_after(0, 0, 0), 8)
    _, traces = traced(model, prompts, max_new_tokens=64, eos_token_id=30, pad_token_id=3, logits_processor=script)
    assert traces[0].output.tolist() == [*range(20, 31), *[3] * 21]
    assert traces[0].official_tokens_per_forward == 11 / traces[0].steps


def test_the_caller_s_processors_are_treated_as_upstream_does(model, prompts):
    """Upstream appends its schedule to that list; watching neither hides it nor leaves an instrument there."""
    kinds = []
    for watch in (contextlib.nullcontext, lambda: observe(model)):
        mine = scripted(lambda _, logits: logits, 8)
        with watch():
            generate(model, prompts, max_new_tokens=32, logits_processor=mine)
        kinds.append([type(processor).__name__ for processor in mine])
    assert kinds[0] == kinds[1]


def test_several_calls_in_one_context(model, prompts):
    with observe(model, seed=5) as traces:
        for _ in range(2):
            model.generate(prompts, max_new_tokens=32, max_denoising_steps=4, **NO_EOS)
    assert [t.canvas for t in traces] == [0] * 6
    assert traces[0].digest() != traces[3].digest(), "the second call goes on with the generator of the first"
