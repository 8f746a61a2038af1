"""A DiffusionGemma as an engine, in the two ways that its weights can be decoded.

    BlockDiffusion      the official `generate()`: whole canvases, adaptive steps
    CausalEncoder       its encoder as a causal language model, a token a forward (`models.decoding.TokenStepper`)

Hooks on encoder and decoder tell when the prompt was read and how many steps each canvas took; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerBase

from dglab_utils.engines.generation import Generation, Stopwatch, encoded, ends_of, up_to_end
from dglab_utils.models.decoding import TokenStepper


class BlockDiffusion:
    """The official `generate()`."""

    def __init__(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool = False,
        seed: int | None = None,
    ):
        """Of a model and its tokenizer.

        Args:
            chat: put prompts through the tokenizer's chat template.
            seed: of the noise of every answer; None draws from the global generator, as `generate()` does.
        """
        self.model, self.tokenizer, self.chat, self.seed = model, tokenizer, chat, seed
        self.name = "block diffusion"

    def generate(self, prompt: str, *, max_new_tokens: int, **settings: Any) -> Generation:
        """An answer of as many canvases as hold so many tokens. `settings` are `generate()`'s."""
        asked = encoded(self.tokenizer, prompt, self.model.device, chat=self.chat)
        watch = Stopwatch(self.model.device)
        read: list[float] = []
        steps: list[int] = []

        def after_encoder(*_: Any) -> None:
            read.append(watch())
            steps.append(0)

        def after_decoder(*_: Any) -> None:
            steps[-1] += 1

        parts = self.model.model.encoder, self.model.model.decoder
        handles = [part.register_forward_hook(f) for part, f in zip(parts, (after_encoder, after_decoder), strict=True)]
        try:
            with self._seeded():
                output = self.model.generate(
                    **asked, **settings, max_new_tokens=max_new_tokens, return_dict_in_generate=True
                )
            seconds = watch()
        finally:
            for handle in handles:
                handle.remove()
        computed = output.sequences[0, asked["input_ids"].shape[1] :].tolist()
        tokens, ended = up_to_end(computed, ends_of(self.model))
        canvases = tuple(count for count in steps if count)
        return Generation(
            engine=self.name,
            model=self.model.name_or_path,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=len(tokens),
            filled=len(canvases) * self.model.config.canvas_length,
            ended=ended,
            forwards=sum(canvases),
            processed=sum(canvases) * self.model.config.canvas_length,
            steps=canvases,
            ids=tuple(tokens),
            prefill_s=read[0],
            decode_s=seconds - read[0],
            peak_bytes=watch.peak_bytes(),
        )

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """The global generator seeded, and put back behind it; as it is where no seed was given."""
        if self.seed is None:
            yield
            return
        device = self.model.device
        kind = "mps" if device.type == "mps" else "cuda"
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device.index or 0], device_type=kind):
            torch.manual_seed(self.seed)
            yield


class CausalEncoder:
    """The encoder of the same weights, which was trained as a causal language model beside the canvas."""

    def __init__(
        self, model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False
    ):
        """Of a model and its tokenizer; `chat` puts prompts through the tokenizer's chat template."""
        self.model, self.tokenizer, self.chat = model, tokenizer, chat
        self.name = "a token at a time"

    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """A greedy answer. Its last prompt token is read by the first forward, which is counted."""
        asked = encoded(self.tokenizer, prompt, self.model.device, chat=self.chat)["input_ids"]
        ends, tokens, ended = ends_of(self.model), list[int](), False
        watch = Stopwatch(self.model.device)
        stepper = TokenStepper(self.model, asked, temperature=0)
        read = watch()
        while len(tokens) < max_new_tokens and not ended:
            tokens.append(int(stepper.step()))
            ended = tokens[-1] in ends
        seconds = watch()
        return Generation(
            engine=self.name,
            model=self.model.name_or_path,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=len(tokens),
            filled=len(tokens),
            ended=ended,
            forwards=len(tokens),
            processed=len(tokens),
            ids=tuple(tokens),
            prefill_s=read,
            decode_s=seconds - read,
            peak_bytes=watch.peak_bytes(),
        )
