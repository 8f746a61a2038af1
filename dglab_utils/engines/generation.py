"""What every engine is asked and answers: a prompt in; text, tokens, forwards, times and memory out.

All engines count tokens in one way: those of the answer, up to and including the first end-of-sequence token. What one
fills behind it, and a fixed-length sampler fills all of it, is no token and not told as speed; it is in `filled`,
and the work over all forwards in `processed`, so that the waste can be shown.

    prefill     reading the prompt, until the first token or canvas is begun
    decode      the rest
    forwards    of the model, without the prompt's own
    steps       denoising steps of each canvas or block; a causal model has none

This module knows no engine, and needs nothing that an older Transformers lacks: `apart` runs it in one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dglab_utils.errors import LabError
from dglab_utils.measure.timing import peak_memory


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        text: of the tokens counted, without the end's own.
        tokens: counted up to and including the first end-of-sequence token.
        filled: positions of the answer that the engine wrote, counted or not.
        ended: whether there was an end, or the limit was met.
        forwards: of the model over answer positions.
        processed: answer positions that went through the model, summed over forwards: a canvas of 256 in 10 steps is
            2560, an answer a token at a time its forwards.
        ids: of the tokens counted; empty where the engine gives text alone.
        steps: of each canvas or block, where there are any.
        prefill_s, decode_s: seconds; None where the engine does not tell them apart (then all is in `decode_s`).
        peak_bytes: of the device's memory above what was there before; None where it was not measured.
        notes: what could not be read, or was left out.
    """

    engine: str
    model: str
    text: str
    tokens: int
    filled: int
    ended: bool
    forwards: int
    processed: int = 0
    steps: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    prefill_s: float | None = None
    decode_s: float | None = None
    peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Reading the prompt and answering. Raises LabError where the engine told no time."""
        if self.decode_s is None:
            raise LabError(f"{self.engine}: told no time")
        return (self.prefill_s or 0.0) + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Of the answer, over all the time."""
        return self.tokens / self.seconds

    @property
    def fault(self) -> str:
        """What makes its speed mean little: "empty", "truncated" by the limit, or nothing."""
        return "empty" if not self.text.strip() else "" if self.ended else "truncated"


class Engine(Protocol):
    """What generates."""

    name: str

    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """An answer of so many tokens at most; whole canvases where the engine knows nothing smaller."""
        ...


def up_to_end(tokens: Sequence[int], ends: Sequence[int]) -> tuple[list[int], bool]:
    """(tokens up to and including the first end, whether there was one)."""
    for i, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: i + 1]), True
    return list(tokens), False


def ends_of(model: Any) -> list[int]:
    """The model's end-of-sequence tokens, none to several: those that its `generate()` stops at."""
    config = getattr(model, "generation_config", None) or model.config
    ends = getattr(config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def encoded(tokenizer: Any, prompt: str, device: torch.device, *, chat: bool) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, `[1, tokens]`, of a prompt; `chat` puts it through the chat template.

    Raises:
        LabError: an empty prompt; a chat that the tokenizer has no template for.
    """
    if not prompt.strip():
        raise LabError("prompt: empty; write what is to be answered")
    if not chat:
        told = tokenizer(prompt, return_tensors="pt")
    elif tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        told = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        raise LabError("chat: this tokenizer has no chat template; ask without")
    return {name: told[name].to(device) for name in ("input_ids", "attention_mask")}


def with_peak(engine: Engine, prompt: str, *, max_new_tokens: int) -> Generation:
    """One answer with the memory that it took. On a CPU PyTorch's profiler counts, so its times are worth nothing."""
    told: list[Generation] = []
    peak = peak_memory(lambda: told.append(engine.generate(prompt, max_new_tokens=max_new_tokens)))
    return told[0] if told[0].peak_bytes is not None else replace(told[0], peak_bytes=peak)


class Stopwatch:
    """Seconds since it was made, with the device's queue empty at every reading; on a GPU its peak of memory too."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        self.began = self._now()

    def __call__(self) -> float:
        return self._now() - self.began

    def peak_bytes(self) -> int | None:
        """Bytes that were allocated at most above what was there at the beginning; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) - self.before if self.on_gpu else None

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()
