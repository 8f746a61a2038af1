"""The loop written to be read gives the tokens of the official one."""

from __future__ import annotations

import pytest
import torch
from small import SMALL, generate, scripted, sure_after
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from dglab_utils.models import build
from dglab_utils.sampling.from_scratch import accept, block_diffusion


def both(model, prompts, *, entropy_bound=0.1, **settings):
    """Sequences of the official loop and of ours, under the same draws."""
    settings = {"max_denoising_steps": 7, "eos_token_id": 10_000, "pad_token_id": 0, **settings}
    config = EntropyBoundSamplerConfig(entropy_bound=entropy_bound)
    official = generate(model, prompts, seed=5, sampler_config=config, **settings).sequences
    torch.manual_seed(5)
    return official, block_diffusion(model, prompts, entropy_bound=entropy_bound, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 32},
        {"max_new_tokens": 100},
        {"max_new_tokens": 32, "max_denoising_steps": 48},
        {"max_new_tokens": 96, "entropy_bound": 60.0},
        {"max_new_tokens": 96, "entropy_bound": 60.0, "stability_threshold": 0, "confidence_threshold": 5.3},
        {"max_new_tokens": 64, "entropy_bound": 1e6, "stability_threshold": 2, "confidence_threshold": 5.3},
        {"max_new_tokens": 128, "eos_token_id": 7},
        {"max_new_tokens": 64, "t_min": 0.01, "t_max": 0.05, "entropy_bound": 30.0},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_token_for_token(prompts, settings, dtype):
    official, ours = both(build(SMALL, dtype=dtype), prompts, **settings)
    assert torch.equal(official, ours)


def test_rows_that_finish_at_different_steps(prompts):
    """With weights scaled up the model is sure of something, and rows stop apart from each other."""
    model = build(SMALL, seed=3)
    with torch.no_grad():
        model.model.decoder.norm.weight.mul_(20)
    settings = {"max_new_tokens": 96, "max_denoising_steps": 24, "confidence_threshold": 0.5}
    config = EntropyBoundSamplerConfig(entropy_bound=5.0)
    apart = generate(model, prompts, seed=5, sampler_config=config, **settings).tokens_per_forward
    assert len(set(apart.tolist())) > 1, "the rows stop together: this would test nothing"
    official, ours = both(model, prompts, entropy_bound=5.0, **settings)
    assert torch.equal(official, ours)


def test_the_rule_is_the_official_one():
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=2.0), 40, 30, 48)
    tokens = torch.zeros(2, 40, dtype=torch.long)
    for seed in range(20):
        logits = 8 * torch.randn(2, 40, 30, generator=torch.Generator().manual_seed(seed))
        sampler.accept_canvas(tokens, tokens, logits, 1)
        assert torch.equal(accept(logits, 2.0), sampler.accepted_token_mask)


def test_scripts_stop_where_they_say(model, prompts):
    """The scripted logits of the other tests drive rows of one batch apart in the official loop: steps 2 and 5."""
    output = generate(model, prompts[:2], max_new_tokens=32, logits_processor=scripted(sure_after(0, 3), 8))
    assert output.tokens_per_forward.tolist() == pytest.approx([32 / 2, 32 / 5])
