"""Masked diffusion: LLaDA's sampler, as published and with the cache and the threshold that later engines added.

    answer <- all masks, in blocks of so many positions
    for each block, from the left:
        while it holds masks:
            logits of all positions, given prompt, what is written and the masks
            the best token of each masked position of the block, and its probability
            write those with the highest probability, keep the rest masked

As published (Nie and others, 2025, arXiv 2502.09992; `generate.py` of ML-GSAI/LLaDA): a fixed number of steps a block,
each writes an equal share of its positions ("low-confidence remasking"); prompt and answer go through the model whole
at every step, as a bidirectional model has nothing that it could keep exactly. Later engines (Fast-dLLM,
arXiv 2505.22618) keep keys and values of all that lies before the block while the block is written, and write every
position whose probability is above a threshold, at least one a step. And an answer that ends in one block needs no
further one: the published sampler writes them all the same.

What a model must do is `MaskModel`; two are here: a DiffusionGemma trained to predict masks, whose encoder reads what
is before the canvas causally, so that its cache is exact; and any bidirectional model of Transformers, whose cache is
an approximation, because what was read before the block would change with it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dglab_utils.engines.generation import Generation, Stopwatch, encoded, ends_of, up_to_end
from dglab_utils.errors import LabError

if TYPE_CHECKING:  # `apart` runs this module in a Transformers that has no DiffusionGemma
    from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


class MaskModel(Protocol):
    """Predicts masked tokens. `tokens` are `[1, T]`: prompt, answer, masks; `start` is where the window begins that is
    being written.
    """

    mask: int
    name: str
    ends: list[int]
    device: torch.device
    window: int  # positions of an answer that the model sees at once; 0 for all

    def logits(self, tokens: Tensor, start: int) -> Tensor:
        """`[T - start, vocabulary]`, everything computed anew."""
        ...

    def kept(self, tokens: Tensor, start: int) -> Any:
        """What is before the window, to be given to `logits_behind`."""
        ...

    def logits_behind(self, kept: Any, tokens: Tensor, start: int) -> Tensor:
        """`[T - start, vocabulary]`, with what is before taken from `kept`, which stays as it is."""
        ...


class MaskedCanvas:
    """A DiffusionGemma trained with masks in place of noise: encoder before the canvas, decoder over it."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, mask: int):
        """`mask` is the token that stands for a position not yet written."""
        self.model, self.mask, self.name = model, mask, model.name_or_path
        self.ends, self.device, self.window = ends_of(model), model.device, model.config.canvas_length

    def logits(self, tokens: Tensor, start: int) -> Tensor:
        """See `MaskModel`."""
        return self.logits_behind(self.kept(tokens, start), tokens, start)

    def kept(self, tokens: Tensor, start: int) -> DynamicCache:
        """See `MaskModel`."""
        return self.model.model.encoder(input_ids=tokens[:, :start]).cache

    def logits_behind(self, kept: DynamicCache, tokens: Tensor, start: int) -> Tensor:
        """See `MaskModel`. The decoder reads a cache and adds nothing to it."""
        return self.model(cache=kept, decoder_input_ids=tokens[:, start:]).logits[0]


class MaskedWhole:
    """Any model of Transformers that attends in both directions and predicts masks, such as LLaDA."""

    def __init__(self, model: PreTrainedModel, mask: int, ends: list[int] | None = None):
        """`mask` is the token that stands for a position not yet written; `ends` are the model's own where None."""
        self.model, self.mask, self.name = model, mask, model.name_or_path
        self.ends, self.device, self.window = ends_of(model) if ends is None else ends, model.device, 0

    def logits(self, tokens: Tensor, start: int) -> Tensor:
        """See `MaskModel`."""
        return self.model(input_ids=tokens).logits[0, start:]

    def kept(self, tokens: Tensor, start: int) -> Any:
        """See `MaskModel`: keys and values of a pass over everything, cut off at the window. The pass is a forward."""
        takes = inspect.signature(self.model.forward).parameters
        known = "use_cache" in takes and "past_key_values" in takes
        cache = getattr(self.model(input_ids=tokens, use_cache=True), "past_key_values", None) if known else None
        if cache is None or not hasattr(cache, "crop"):
            raise LabError(f"{self.name}: keeps no keys and values, so nothing can be cached; ask without the cache")
        cache.crop(start - tokens.shape[1])  # so many less, as a negative number
        return cache

    def logits_behind(self, kept: Any, tokens: Tensor, start: int) -> Tensor:
        """See `MaskModel`."""
        at = torch.arange(start, tokens.shape[1], device=tokens.device)[None]
        told = self.model(input_ids=tokens[:, start:], past_key_values=kept, position_ids=at, use_cache=True).logits[0]
        kept.crop(start - tokens.shape[1])  # the pass has added its own
        return told


class MaskedDiffusion:
    """LLaDA's sampler as an engine.

    Attributes:
        steps: forwards for each block, as published; None with a threshold, which decides itself.
        block: positions that are written before the next ones begin.
        cached: keep what is before the block.
        threshold: probability above which a position is written; None for the fixed number of steps.
        stop: write no block behind the one in which the answer ends. As published all are written.
    """

    def __init__(
        self,
        model: MaskModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block: int,
        steps: int | None = None,
        cached: bool = False,
        threshold: float | None = None,
        stop: bool = False,
        chat: bool = False,
    ):
        """Raises LabError for settings that cannot be meant."""
        if (steps is None) == (threshold is None):
            raise LabError("masked diffusion: give steps of a block, or a threshold, and not both")
        wrong = (steps is not None and not 1 <= steps <= block) or (threshold is not None and not 0 < threshold < 1)
        if block < 1 or wrong:
            raise LabError(f"masked diffusion: block {block}, steps {steps}, threshold {threshold}: cannot be met")
        if model.window and model.window % block:
            raise LabError(f"masked diffusion: blocks of {block} do not fill a canvas of {model.window}")
        self.model, self.tokenizer, self.chat = model, tokenizer, chat
        self.block, self.steps, self.cached, self.threshold, self.stop = block, steps, cached, threshold, stop
        ways = ["cached" if cached else "uncached", f"{steps} steps a block" if steps else f"threshold {threshold:g}"]
        self.name = f"masked diffusion, {', '.join(ways)}, blocks of {block}"

    @torch.no_grad()
    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """An answer of so many tokens, in whole blocks and canvases; no canvas follows the one in which it ends."""
        asked = encoded(self.tokenizer, prompt, self.model.device, chat=self.chat)["input_ids"]
        begin, blocks = asked.shape[1], -(-max_new_tokens // self.block)
        last = begin + blocks * self.block
        window = self.model.window or last - begin
        watch = Stopwatch(self.model.device)
        steps: list[int] = []
        tokens, read, start, behind = asked, 0.0, begin, begin
        kept, edge, kept_to, processed, keeping = None, begin, -1, 0, 0
        while behind < last:
            if behind == tokens.shape[1]:  # the next canvas, all masks
                start = behind
                masks = torch.full((1, min(window, last - start)), self.model.mask, device=tokens.device)
                tokens = torch.cat([tokens, masks], dim=1)
            # A model that sees the whole answer keeps what is before the block; a canvas is read as one.
            edge = start if self.model.window else behind
            if self.cached and edge != kept_to:
                kept, kept_to = self.model.kept(tokens, edge), edge
                if not self.model.window:  # which goes over answer and masks too
                    keeping, processed = keeping + 1, processed + tokens.shape[1] - begin
            if not steps:
                read = watch() if self.cached else 0.0
            steps.append(self._write(tokens, edge, slice(behind, behind + self.block), kept))
            first = edge if self.cached or self.model.window else begin
            processed += steps[-1] * (tokens.shape[1] - first)
            behind += self.block
            if (self.stop or behind == tokens.shape[1]) and up_to_end(
                tokens[0, begin:behind].tolist(), self.model.ends
            )[1]:
                break
        seconds = watch()
        filled = tokens[0, begin:behind].tolist()
        told, ended = up_to_end(filled, self.model.ends)
        return Generation(
            engine=self.name,
            model=self.model.name,
            text=self.tokenizer.decode(told, skip_special_tokens=True),
            tokens=len(told),
            filled=len(filled),
            ended=ended,
            forwards=sum(steps) + keeping,
            processed=processed,
            steps=tuple(steps),
            ids=tuple(told),
            prefill_s=read if self.cached else None,
            decode_s=seconds - read,
            peak_bytes=watch.peak_bytes(),
        )

    def _write(self, tokens: Tensor, start: int, block: slice, kept: Any) -> int:
        """Writes a block in place; returns the steps that it took."""
        steps = 0
        while (masked := (tokens[0, block] == self.model.mask).nonzero().flatten()).numel():
            logits = self.model.logits(tokens, start) if kept is None else self.model.logits_behind(kept, tokens, start)
            probability = logits[block.start - start : block.stop - start].float().softmax(-1)
            probability[:, self.model.mask] = 0  # a mask is no answer
            best, token = probability.max(-1)
            if self.threshold is None:
                assert self.steps is not None
                # Equal shares, the first ones larger by one where they do not divide.
                size = block.stop - block.start
                count = size // self.steps + (steps < size % self.steps)
                chosen = masked[best[masked].topk(min(count, masked.numel())).indices]
            else:
                sure = masked[best[masked] > self.threshold]
                chosen = sure if sure.numel() else masked[best[masked].argmax()][None]
            tokens[0, block.start + chosen] = token[chosen]
            steps += 1
        return steps
