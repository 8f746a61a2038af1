"""Faults of the pinned Transformers that the book names ("Found on the way" in book/algorithm.md).

A test here fails when upstream mends the fault: then take it off the page. Older versions that the sampling tests also
run on have some of them too, and are not asked.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from small import SMALL, generate
from transformers import LogitsProcessorList
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
)

from dglab_utils.models import build

pytestmark = pytest.mark.skipif(transformers.__version__ != "5.24.0", reason="the book speaks of the pinned version")


@pytest.mark.parametrize("settings", [{"confidence_threshold": 0.0}, {"stability_threshold": -1}])
def test_refusing_a_threshold_fails(settings):
    with pytest.raises(AttributeError, match="entropy_bound"):
        DiffusionGemmaGenerationConfig(**settings)


def test_static_cache_keeps_the_first_entropy_bound(prompts, monkeypatch):
    # What matters is which sampler's method is kept; compiling it for real gives the same and takes minutes.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def tokens(model, bound, **settings):
        config = EntropyBoundSamplerConfig(entropy_bound=bound)
        return generate(model, prompts, max_new_tokens=32, sampler_config=config, **settings).sequences

    fresh, model = build(SMALL), build(SMALL)
    tight, loose = tokens(fresh, 0.1), tokens(fresh, 1e6)
    assert not torch.equal(tight, loose)
    tokens(model, 0.1, cache_implementation="static")
    second = tokens(model, 1e6, cache_implementation="static")
    assert torch.equal(second, tight)
    assert torch.equal(tokens(build(SMALL), 1e6, cache_implementation="static"), loose)


def test_the_compiled_stop_test_is_never_called(model, prompts, monkeypatch):
    called = []

    def counting(function, **_):
        def wrapper(*args, **kwargs):
            called.append(getattr(function, "__qualname__", ""))
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(torch, "compile", counting)
    generate(build(SMALL), prompts, max_new_tokens=32, cache_implementation="static")
    assert "EntropyBoundSampler.accept_canvas" in called
    assert "StableAndConfidentStoppingCriteria.__call__" not in called


def test_a_list_of_processors_cools_twice_when_it_is_used_twice(model, prompts):
    mine = LogitsProcessorList()
    for calls in (1, 2):
        generate(model, prompts, max_new_tokens=32, logits_processor=mine)
        assert [type(p) for p in mine] == [LinearTemperatureScheduleLogitsProcessor] * calls


def test_eager_attention_refuses_padded_prompts(prompts):
    eager = build(SMALL)
    eager.set_attn_implementation("eager")
    mask = torch.ones_like(prompts)
    generate(eager, prompts, max_new_tokens=32, attention_mask=mask)
    mask[0, :2] = 0
    with pytest.raises(TypeError, match="floating point"):
        generate(eager, prompts, max_new_tokens=32, attention_mask=mask)


def test_a_few_tokens_cost_a_canvas(model, prompts):
    output = generate(model, prompts, max_new_tokens=10)
    assert output.sequences.shape[1] - prompts.shape[1] == SMALL.canvas_length
