"""A small shape and scripted logits, for the sampling tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import DiffusionGemmaForBlockDiffusion, LogitsProcessor, LogitsProcessorList

from dglab_utils.models import shape

SMALL = replace(shape("toy-1m"), name="small", canvas_length=32, vocab=200, max_positions=512)
# Transformers 5.11 ends outputs at ids 1, 50 and 106 unless told otherwise; this one is in no vocabulary here.
NO_EOS = {"eos_token_id": 10_000, "pad_token_id": 0}


class Scripted(LogitsProcessor):
    """Replaces the model's logits by `script(elapsed steps, logits)`; `generate()` applies it before the schedule."""

    def __init__(self, script: Callable[[int, torch.Tensor], torch.Tensor], steps: int):
        self.script, self.steps = script, steps

    def __call__(self, input_ids, scores, cur_step):
        return self.script(self.steps - int(cur_step), scores.clone())


def scripted(script: Callable[[int, torch.Tensor], torch.Tensor], steps: int) -> LogitsProcessorList:
    return LogitsProcessorList([Scripted(script, steps)])


def sure_after(*steps: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Row r is sure of the tokens 20 + r * 40 + position from step `steps[r]` on; its logits are flat before."""

    def script(elapsed: int, logits: torch.Tensor) -> torch.Tensor:
        logits.zero_()
        for row, step in enumerate(steps):
            if elapsed >= step:
                target = torch.arange(20, 20 + logits.shape[1]) + row * 40
                logits[row].scatter_(-1, target[:, None], 30.0)
        return logits

    return script


def generate(model: DiffusionGemmaForBlockDiffusion, prompts: torch.Tensor, *, seed: int = 0, **settings):
    """`model.generate` from a seeded global generator, as an output object."""
    torch.manual_seed(seed)
    return model.generate(prompts, return_dict_in_generate=True, **{**NO_EOS, "max_denoising_steps": 8, **settings})
