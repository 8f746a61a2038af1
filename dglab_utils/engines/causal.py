"""One token at a time: any causal language model of Transformers, greedily.

`generate()` does the work; a logits processor that changes nothing tells when the prompt was read and how often the
model was called. Weights come from a folder, the Hub or a GGUF file, through `models.loading`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from dglab_utils.engines.generation import Generation, Stopwatch, encoded, ends_of, up_to_end


class _Called(LogitsProcessor):
    """Counts the forwards, and notes when the first was done."""

    def __init__(self, watch: Stopwatch):
        self.watch, self.count, self.first = watch, 0, 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.count:
            self.first = self.watch()
        self.count += 1
        return scores


class Causal:
    """A causal language model as an engine."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False):
        """Of a model and its tokenizer; `chat` puts prompts through the tokenizer's chat template."""
        self.model, self.tokenizer, self.chat = model, tokenizer, chat
        self.name = "causal"

    def generate(self, prompt: str, *, max_new_tokens: int, **settings: Any) -> Generation:
        """A greedy answer, whatever the checkpoint's own settings say. `settings` are `generate()`'s."""
        asked = encoded(self.tokenizer, prompt, self.model.device, chat=self.chat)
        watch = Stopwatch(self.model.device)
        called = _Called(watch)
        output = self.model.generate(
            **asked,
            **{"do_sample": False, "repetition_penalty": 1.0} | settings,
            max_new_tokens=max_new_tokens,
            logits_processor=LogitsProcessorList([called]),
        )
        seconds = watch()
        computed = output[0, asked["input_ids"].shape[1] :].tolist()
        tokens, ended = up_to_end(computed, ends_of(self.model))
        return Generation(
            engine=self.name,
            model=self.model.name_or_path,
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=len(tokens),
            filled=len(computed),
            ended=ended,
            forwards=called.count - 1,  # the first token comes with the prompt
            processed=called.count - 1,
            ids=tuple(tokens),
            prefill_s=called.first,
            decode_s=seconds - called.first,
            peak_bytes=watch.peak_bytes(),
        )
