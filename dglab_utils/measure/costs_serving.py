"""Requests built from forwards: what serving a load costs with a canvas at a time, and with a token at a time.

A load is a batch of equal requests: so many prompt tokens, so many output tokens, all rows in step. A diffusion request
is one prefill, `steps` denoising steps for each canvas, and one encoder pass over each finished canvas but the last
(as `generate()` runs it). An autoregressive one is one prefill and one forward a token, or, with multi-token
prediction, one forward for every few. Forwards are costed at the mean context of the request: cost grows with context
almost linearly, so the mean stands for the sum.

Knows nothing of queues, of rows that stop early, or of quality: equal output is taken to be worth the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dglab_utils.errors import LabError
from dglab_utils.measure.costs import (
    ENGINE,
    PRECISIONS,
    Cost,
    Efficiency,
    Hardware,
    Mode,
    ModelShape,
    Part,
    Precision,
    Software,
    Time,
    forward,
    memory,
    seconds,
)

LARGEST_BATCH = 256
"""Where the search for a break-even ends."""
USABLE = 0.9
"""Of the memory; engines keep the rest for activations and the driver."""


@dataclass(frozen=True)
class Drafts:
    """Multi-token prediction: `count` tokens guessed ahead, each accepted with probability `acceptance`.

    A draft head is taken to be one layer with an LM head of the model's size.
    """

    count: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.acceptance < 1:
            raise LabError(f"drafts {self.count}, acceptance {self.acceptance}: want at least 1, and from 0 to below 1")

    @property
    def tokens_a_round(self) -> float:
        """Expected tokens of one round, (1 − a^(k+1)) / (1 − a): the first rejection ends it (Y. Leviathan et al.,
        Fast Inference from Transformers via Speculative Decoding, 2023, equation 1).
        """
        return (1 - self.acceptance ** (self.count + 1)) / (1 - self.acceptance)


@dataclass(frozen=True)
class Load:
    """`batch` requests at once, of `prompt` tokens in and `output` tokens out; denoising `steps` a canvas."""

    batch: int
    prompt: int
    output: int
    steps: float

    def __post_init__(self) -> None:
        if self.batch < 1 or self.prompt < 1 or self.output < 1 or self.steps < 1:
            raise LabError(
                f"batch {self.batch}, prompt {self.prompt}, output {self.output}, steps {self.steps}: want at least 1"
            )


@dataclass(frozen=True)
class Setup:
    """What serves: card, precision, software, and how well the hardware is used."""

    hardware: Hardware
    precision: Precision
    efficiency: Efficiency
    software: Software = ENGINE


@dataclass(frozen=True)
class Serving:
    """One way to serve a load. Times in s, rates in output tokens/s over all rows.

    Attributes:
        prefill: the prompt. first: until the reader sees something: a token, or a whole canvas.
        step: one forward of decoding, by component. total: the requests from begin to end.
        memory: bytes at the end of the requests, when the cache is longest. fits: the largest batch that has room.
    """

    prefill: float
    first: float
    step: Time
    total: float
    rate: float
    memory: float
    fits: int


@dataclass(frozen=True)
class Comparison:
    """Both ways for one load.

    Attributes:
        speedup: diffusion's rate over autoregression's, at equal batch.
        break_even: the smallest batch up to `LARGEST_BATCH` at which diffusion is not faster; None when there is none.
    """

    diffusion: Serving
    autoregressive: Serving
    speedup: float
    break_even: int | None


def autoregressive(shape: ModelShape) -> ModelShape:
    """The sibling that decodes token by token: the same text shape without self-conditioning."""
    return replace(shape, name=f"{shape.name}, autoregressive", self_conditioning=False)


def serve_diffusion(shape: ModelShape, load: Load, setup: Setup) -> Serving:
    """The load, a canvas at a time."""
    canvases = math.ceil(load.output / shape.canvas_length)
    context = load.prompt + (canvases - 1) * shape.canvas_length / 2  # mean, when a canvas begins
    prefill = _prefill(shape, load, setup)
    step = _seconds(shape, "canvas", load.batch, _whole(context), None, setup)
    encode = _seconds(shape, "prefill", load.batch, _whole(context), shape.canvas_length, setup).total
    total = prefill + canvases * load.steps * step.total + (canvases - 1) * encode
    longest = load.prompt + canvases * shape.canvas_length
    return Serving(
        prefill,
        prefill + load.steps * _seconds(shape, "canvas", load.batch, load.prompt, None, setup).total,
        step,
        total,
        load.batch * load.output / total,
        memory(
            shape,
            "canvas",
            batch=load.batch,
            context=longest,
            precision=setup.precision,
            software=setup.software,
        ).total,
        largest_batch(shape, "canvas", longest, setup),
    )


def serve_autoregressive(shape: ModelShape, load: Load, setup: Setup, drafts: Drafts | None = None) -> Serving:
    """The load, a token at a time, or with multi-token prediction `drafts.tokens_a_round` in a round."""
    context = _whole(load.prompt + load.output / 2)
    prefill = _prefill(shape, load, setup)
    token = _seconds(shape, "ar", load.batch, context, None, setup)
    head = token.by_component["LM head"] + token.by_component["sampler"]  # the first token is sampled after prefill
    if drafts is None:
        step, tokens = token, 1.0
    else:
        step = _round(shape, load.batch, context, drafts, setup)
        tokens = drafts.tokens_a_round
    total = prefill + head + (load.output - 1) / tokens * step.total
    return Serving(
        prefill,
        prefill + head,
        step,
        total,
        load.batch * load.output / total,
        memory(
            shape,
            "ar",
            batch=load.batch,
            context=load.prompt + load.output,
            precision=setup.precision,
            software=setup.software,
        ).total,
        largest_batch(shape, "ar", load.prompt + load.output, setup),
    )


def compare(shape: ModelShape, load: Load, setup: Setup, drafts: Drafts | None = None) -> Comparison:
    """A diffusion model against its autoregressive sibling."""
    sibling = autoregressive(shape)
    diffusion, other = serve_diffusion(shape, load, setup), serve_autoregressive(sibling, load, setup, drafts)
    batches = range(1, LARGEST_BATCH + 1)
    even = next((b for b in batches if speedup(shape, replace(load, batch=b), setup, drafts) <= 1), None)
    return Comparison(diffusion, other, diffusion.rate / other.rate, even)


def speedup(shape: ModelShape, load: Load, setup: Setup, drafts: Drafts | None = None) -> float:
    """Output tokens/s of a diffusion model over those of its autoregressive sibling."""
    other = serve_autoregressive(autoregressive(shape), load, setup, drafts)
    return serve_diffusion(shape, load, setup).rate / other.rate


def largest_batch(shape: ModelShape, mode: Mode, context: int, setup: Setup) -> int:
    """Rows that fit into `USABLE` of the memory; 0 when one does not."""
    one = memory(shape, mode, batch=1, context=context, precision=setup.precision, software=setup.software)
    return max(0, math.floor((USABLE * setup.hardware.memory - one.weights) / (one.cache + one.vocabulary)))


def _prefill(shape: ModelShape, load: Load, setup: Setup) -> float:
    return _seconds(shape, "prefill", load.batch, 0, load.prompt, setup).total


def _round(shape: ModelShape, batch: int, context: int, drafts: Drafts, setup: Setup) -> Time:
    """One round of multi-token prediction: the drafts, one after the other, and a forward that checks them all."""
    check = _seconds(shape, "ar", batch, context, drafts.count + 1, setup)
    draft = seconds(
        _draft(forward(shape, "ar", batch=batch, context=context, precision=setup.precision, software=setup.software)),
        setup.hardware,
        setup.efficiency,
    )
    return Time(
        {c: check.by_component[c] + drafts.count * draft.by_component[c] for c in check.by_component},
        check.overhead + drafts.count * draft.overhead,
    )


def _draft(token: Cost) -> Cost:
    """A forward of one layer with the whole LM head and sampler, from one of all layers."""

    def scaled(part: Part) -> Part:
        share = 1.0 if part.component in ("LM head", "sampler") else 1.0 / token.layers
        return replace(part, flops=part.flops * share, bytes=part.bytes * share)

    return Cost(tuple(map(scaled, token.parts)), 1)


def _seconds(shape: ModelShape, mode: Mode, batch: int, context: int, tokens: int | None, setup: Setup) -> Time:
    cost = forward(
        shape,
        mode,
        batch=batch,
        context=context,
        tokens=tokens,
        precision=setup.precision,
        software=setup.software,
    )
    return seconds(cost, setup.hardware, setup.efficiency)


def _whole(context: float) -> int:
    return math.floor(context)


def setup_of(hardware: Hardware, precision: str, efficiency: Efficiency, software: Software = ENGINE) -> Setup:
    """The setup with the precision of this name.

    Raises:
        LabError: no such precision.
    """
    if precision not in PRECISIONS:
        raise LabError(f"precision {precision!r}: there are {', '.join(PRECISIONS)}")
    return Setup(hardware, PRECISIONS[precision], efficiency, software)
