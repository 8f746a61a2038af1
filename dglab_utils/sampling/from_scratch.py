"""Block diffusion in a hundred lines: what `generate()` does, written to be read.

    prompt ──encoder──▶ cache            (causal, once a canvas)
                          │
    random canvas ─▶ decoder ─▶ logits ─▶ temper ─▶ draw a candidate, take the argmax
          ▲                                              │
          └── redraw the rest ◀── keep the low-entropy ◀─┘      until the argmax is stable and sure, or 48 steps
                                                                then append the argmax, and start the next canvas

`block_diffusion` returns the tokens of `model.generate(...)` under the same random draws, bit for bit (tests/sampling/
test_from_scratch.py): it draws with the same functions in the same order. It lacks only what `generate()` adds around
this: other devices and caches, streaming, images, compiled loops, padded prompts, several EOS ids, and the checking
of settings.
"""

from __future__ import annotations

from inspect import signature

import torch
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

# What the cache argument is called: `past_key_values` before Transformers renamed it.
CACHE = "cache" if "cache" in signature(DiffusionGemmaForBlockDiffusion.forward).parameters else "past_key_values"


@torch.no_grad()
def block_diffusion(
    model: DiffusionGemmaForBlockDiffusion,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int = 256,
    max_denoising_steps: int = 48,
    entropy_bound: float = 0.1,
    t_min: float = 0.4,
    t_max: float = 0.8,
    stability_threshold: int = 1,
    confidence_threshold: float = 0.005,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> torch.Tensor:
    """`[B, P]` prompts to `[B, P + canvases * L]` sequences; L is the model's canvas length.

    Args:
        max_new_tokens: rounded up to whole canvases.
        max_denoising_steps: the cap on decoder forwards a canvas, and the length of the temperature schedule.
        entropy_bound: nats that the accepted tokens may hold together, the most uncertain one not counted.
        t_min, t_max: the temperature falls from `t_max` towards `t_min`, which the last step does not quite reach.
        stability_threshold: steps for which the argmax canvas must not have changed.
        confidence_threshold: nats, the mean entropy below which a canvas may stop.
        eos_token_id, pad_token_id: a row ends with the canvas that holds an EOS; what follows it is padding.
    """
    batch, length, vocab = input_ids.shape[0], model.config.canvas_length, model.config.text_config.vocab_size
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    unread = input_ids
    ended = torch.zeros(batch, dtype=torch.bool)

    for _ in range(-(-max_new_tokens // length)):
        # The encoder reads what it has not read yet, causally; from here on the canvas sees it through the cache.
        model.model.encoder(input_ids=unread, **{CACHE: cache})

        canvas = torch.randint(vocab, (batch, length))  # [B, L] the noise that everything starts from
        answer = canvas
        history = torch.full((stability_threshold, batch, length), -1)
        logits = None  # [B, L, V] of the step before: the self-conditioning signal
        done = torch.zeros(batch, dtype=torch.bool)

        for step in range(max_denoising_steps, 0, -1):  # steps that remain
            raw = model(decoder_input_ids=canvas, self_conditioning_logits=logits, **{CACHE: cache}).logits
            # In float32, as upstream: the schedule's last bit decides draws.
            tempered = raw / (t_min + (t_max - t_min) * (torch.tensor(step) / max_denoising_steps))
            probabilities = torch.softmax(tempered, dim=-1)
            candidates = torch.multinomial(probabilities.view(-1, vocab), 1).view(batch, length)
            best = tempered.argmax(dim=-1)

            accepted = accept(tempered, entropy_bound)  # [B, L]
            noise = torch.randint(vocab, (batch, length))
            renoised = torch.where(accepted, candidates, noise)

            # A row that has stopped keeps what it had while its neighbours go on.
            canvas = torch.where(done[:, None], canvas, renoised)
            answer = torch.where(done[:, None], answer, best)
            logits = tempered if logits is None else torch.where(done[:, None, None], logits, tempered)

            stable = (history == answer).all(dim=-1).all(dim=0)
            history = torch.cat([history, answer[None]])[1:]
            done |= stable & (entropy(logits).mean(dim=-1) < confidence_threshold)
            logits = logits.to(model.dtype)
            if done.all():
                break

        canvas_out = answer
        if pad_token_id is not None:
            canvas_out = padded(answer, ended, eos_token_id, pad_token_id)
        input_ids = torch.cat([input_ids, canvas_out], dim=-1)
        unread = canvas_out
        if eos_token_id is not None:
            ended |= (canvas_out == eos_token_id).any(dim=-1)
            if ended.all():
                break
    return input_ids


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """`[..., V]` logits to `[...]` nats."""
    return torch.distributions.Categorical(logits=logits).entropy()


def accept(logits: torch.Tensor, entropy_bound: float) -> torch.Tensor:
    """`[B, L]` the positions to keep: the most certain ones, as many as the bound allows.

    With the entropies in ascending order, position k is kept while the sum of those before it is at most the bound
    (arXiv 2505.24857: what a set of tokens can share is at most the sum of their entropies less the largest). The
    first is always kept, so that a canvas moves by at least one token a step.
    """
    ascending, order = torch.sort(entropy(logits), dim=-1)
    before = torch.cumsum(ascending, dim=-1) - ascending
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before <= entropy_bound)


def padded(tokens: torch.Tensor, ended: torch.Tensor, eos: int | None, pad: int) -> torch.Tensor:
    """`[B, L]` with padding after the first EOS, and throughout in rows that ended in an earlier canvas."""
    tokens = tokens.masked_fill(ended[:, None], pad)
    if eos is None:
        return tokens
    seen = (tokens == eos).cumsum(dim=-1)
    return tokens.masked_fill((seen > 0) & ~((seen == 1) & (tokens == eos)), pad)
