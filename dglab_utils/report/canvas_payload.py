"""Packs a CanvasTrace into one base64 string that a page can hold.

A 48 x 256 run is 450 KB of plain JSON. Here it is a handful of byte planes, each coded against what is already
known and then deflated on its own (one Huffman table a plane), 60 KB at the very most:

    header    JSON: sizes, settings, and the per-step numbers
    ids       the token ids that occur, ascending, as differences (LEB128); a token is its rank in this list + 1
    texts     JSON: the text of each id, 0 where it is not carried
    accepted  one bit a cell, XORed with the step before
    argmax    ranks, one plane a byte; 0 = the step before's
    current   ranks; 0 = the step before's argmax where that step accepted the position, elsewhere "left out"
    entropy   one byte a cell on a square-root scale, as the difference from the step before: sqrt(entropy / largest)
              comes back within 1/510, which is 0.4 % of the largest entropy at worst and far less where it is small
    kl        the same, where the trace kept its logits

`static/canvas_viewer.js` unpacks it; the two must change together, and `VERSION` with them. `sampled` is left out:
where it was accepted it is the next step's current token, elsewhere the sampler threw it away.

Noise does not compress. When a run exceeds its budget, what tells least goes first (`_LADDER`): the texts of tokens
that were never more than noise, the resolution of the entropy, the ids of the noise, the rest of the current canvas,
the KL; last the texts of tokens that are not in the final canvas. The header records what was left out, and the viewer
says so.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dglab_utils.errors import LabError
from dglab_utils.sampling.trace import CanvasTrace

VERSION = 1

Decode = Callable[[int], str] | Sequence[str] | None


@dataclass(frozen=True)
class _Detail:
    """How much of a run is kept.

    Attributes:
        levels: steps on the entropy and KL scales, 255 at most.
        current: the current canvas: "all" of it, the tokens "kept" from the step before, or "none".
        kl: the KL to the final distribution.
    """

    levels: int
    current: Literal["all", "kept", "none"]
    kl: bool


_LADDER = (
    _Detail(levels=255, current="all", kl=True),
    _Detail(levels=100, current="all", kl=True),
    _Detail(levels=255, current="kept", kl=True),
    _Detail(levels=100, current="kept", kl=True),
    _Detail(levels=100, current="none", kl=True),
    _Detail(levels=64, current="none", kl=False),
)


def pack(trace: CanvasTrace, decode: Decode = None, budget: int | None = None, label: str = "") -> str:
    """The run as base64, equal bytes for equal input.

    Args:
        trace: the run.
        decode: token id to text: a function, a list indexed by id, or None to show ids.
        budget: characters of base64 to stay within; None keeps everything.
        label: what the viewer calls the run.

    Raises:
        LabError: arrays that disagree in shape, values that are not finite, or a `decode` that does not know an id.
    """
    _check(trace)
    limit = math.inf if budget is None else budget
    text_of = None if decode is None else functools.cache(functools.partial(_text, decode))
    for detail in _LADDER:
        packing = _Packing.of(trace, text_of, detail, label)
        for texts in (len(packing.tokens.ids), packing.tokens.seen):
            if len(payload := packing.base64(texts)) <= limit:
                return payload
    return packing.base64(_largest(lambda texts: len(packing.base64(texts)) <= limit, packing.tokens.seen))


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a run.

    Attributes:
        ids: [n] the ids that occur, ascending.
        texts: text of each id; None where everything is shown by id.
        order: [n] the ranks, those whose text tells most first: in the final canvas, argmax or accepted once, noise.
        seen: how many of `order` were ever more than noise.
    """

    ids: np.ndarray
    texts: list[str] | None
    order: np.ndarray
    seen: int

    @classmethod
    def of(cls, trace: CanvasTrace, text_of: Callable[[int], str] | None, detail: _Detail) -> _Tokens:
        more_than_noise = [trace.argmax.ravel()] + ([] if detail.current == "none" else [trace.current[_kept(trace)]])
        seen = np.unique(np.concatenate(more_than_noise))
        ids = np.union1d(seen, trace.current) if detail.current == "all" else seen
        order = np.lexsort((ids, ~np.isin(ids, seen), ~np.isin(ids, trace.argmax[-1])))
        return cls(ids, None if text_of is None else [text_of(i) for i in ids.tolist()], order, len(seen))

    def text_json(self, count: int) -> bytes:
        """The texts of the first `count` tokens of `order`, in the order of `ids`; 0 for the others."""
        if self.texts is None:
            return b"[]"
        kept: list[str | int] = [0] * len(self.ids)
        for rank in self.order[:count]:
            kept[rank] = self.texts[rank]
        return json.dumps(kept, separators=(",", ":")).encode()

    def rank(self, tokens: np.ndarray) -> np.ndarray:
        """Rank of each token, from 1: 0 says that the token was left out. Tokens not in `ids` get a meaningless one."""
        return np.searchsorted(self.ids, tokens).astype(np.uint32) + 1


@dataclass(frozen=True)
class _Packing:
    """A run at one level of detail, all but the texts deflated."""

    head: bytes
    tokens: _Tokens
    planes: list[bytes]

    @classmethod
    def of(cls, trace: CanvasTrace, text_of: Callable[[int], str] | None, detail: _Detail, label: str) -> _Packing:
        tokens = _Tokens.of(trace, text_of, detail)
        head = json.dumps(_header(trace, tokens, detail, label), separators=(",", ":")).encode()
        ids = _leb128(np.diff(tokens.ids, prepend=0))
        planes = [_deflated(plane) for plane in _planes(trace, tokens, detail)]
        return cls(_deflated(head) + _deflated(ids), tokens, planes)

    def base64(self, texts: int) -> str:
        """Everything, with the texts of the first `texts` tokens of `tokens.order`."""
        return base64.b64encode(b"".join([self.head, _deflated(self.tokens.text_json(texts)), *self.planes])).decode()


def _check(trace: CanvasTrace) -> None:
    shape = trace.current.shape
    if len(shape) != 2 or 0 in shape:
        raise LabError(
            f"the trace's current canvas has shape {shape}: the viewer needs [steps, canvas_length], neither 0"
        )
    for name in ("argmax", "entropy", "accepted"):
        if getattr(trace, name).shape != shape:
            raise LabError(
                f"the trace's {name} has shape {getattr(trace, name).shape}, its current canvas {shape}: one run?"
            )
    for name in ("temperature", "mean_entropy", "stable", "confident"):
        if getattr(trace, name).shape != shape[:1]:
            raise LabError(f"the trace's {name} has shape {getattr(trace, name).shape} for {shape[0]} steps: one run?")
    if min(trace.current.min(), trace.argmax.min()) < 0:
        raise LabError("the trace holds a negative token id: record it again")
    if not np.isfinite(trace.entropy).all():
        step, position = np.argwhere(~np.isfinite(trace.entropy))[0]
        raise LabError(
            f"the trace's entropy is not finite at step {step}, position {position}: look at the logits there"
        )
    if trace.logits is not None and not np.isfinite(trace.kl_to_final).all():
        raise LabError(
            "the trace's KL to the final distribution is not finite (a logit of -inf?): "
            "view it without, as dataclasses.replace(trace, logits=None)"
        )


def _text(decode: Callable[[int], str] | Sequence[str], token: int) -> str:
    try:
        text = decode(token) if callable(decode) else decode[token]
    except (IndexError, KeyError):
        raise LabError(f"decode has no text for token {token}: pass one that covers the vocabulary, or None") from None
    if not isinstance(text, str):
        raise LabError(f"decode gave {type(text).__name__} for token {token}: it must give str")
    return text


def _kept(trace: CanvasTrace) -> np.ndarray:
    """[S, L] where the current token was accepted by the step before; elsewhere it is a random draw."""
    return np.concatenate([np.zeros_like(trace.accepted[:1]), trace.accepted[:-1]])


def _header(trace: CanvasTrace, tokens: _Tokens, detail: _Detail, label: str) -> dict[str, object]:
    return {
        "version": VERSION,
        "label": label,
        "steps": trace.steps,
        "length": trace.canvas_length,
        "planes": _width(tokens),
        "currentKept": detail.current,
        "levels": detail.levels,
        "entropyTop": float(trace.entropy.max().clip(0)),
        "klTop": float(trace.kl_to_final.max().clip(0)) if detail.kl and trace.logits is not None else None,
        "klLeftOut": trace.logits is not None and not detail.kl,
        "stopped": trace.stopped,
        "temperature": [_short(t) for t in trace.temperature],
        "meanEntropy": [_short(h) for h in trace.mean_entropy],
        "stable": [int(s) for s in trace.stable],
        "confident": [int(c) for c in trace.confident],
    }


def _planes(trace: CanvasTrace, tokens: _Tokens, detail: _Detail) -> list[bytes]:
    """Everything that has one value a cell, in the order that the module's docstring gives."""
    kept, argmax, current = _kept(trace), tokens.rank(trace.argmax), tokens.rank(trace.current)
    expected = _earlier(argmax)
    coded = [np.where(argmax == expected, 0, argmax)]
    if detail.current != "none":
        noise = current if detail.current == "all" else 0
        coded.append(np.where(kept, np.where(current == expected, 0, current), noise))
    planes = [np.packbits(trace.accepted ^ _earlier(trace.accepted), bitorder="little").tobytes()]
    for ranks in coded:
        planes += [(ranks >> 8 * i).astype(np.uint8).tobytes() for i in range(_width(tokens))]
    planes.append(_levels(trace.entropy, detail.levels))
    if detail.kl and trace.logits is not None:
        planes.append(_levels(trace.kl_to_final, detail.levels))
    return planes


def _width(tokens: _Tokens) -> int:
    """Bytes that a rank needs."""
    return max(1, (len(tokens.ids).bit_length() + 7) // 8)


def _earlier(array: np.ndarray) -> np.ndarray:
    """Each step's values one step before; zeros before the first."""
    return np.concatenate([np.zeros_like(array[:1]), array[:-1]])


def _levels(values: np.ndarray, levels: int) -> bytes:
    """Values >= 0 on a square-root scale that ends at their maximum, as differences (mod 256) from the step before."""
    values = values.clip(0).astype(np.float64)
    scaled = np.rint(levels * np.sqrt(values / (values.max() or 1.0))).astype(np.uint8)
    return (scaled - _earlier(scaled)).tobytes()


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _leb128(numbers: np.ndarray) -> bytes:
    out = bytearray()
    for number in numbers.tolist():
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def _deflated(section: bytes) -> bytes:
    """A section as the payload holds it: raw deflate, behind its length (uint32, little endian)."""
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    squeezed = squeezer.compress(section) + squeezer.flush()
    return struct.pack("<I", len(squeezed)) + squeezed


def _largest(fits: Callable[[int], bool], top: int) -> int:
    """The largest number in 0..top that fits, by bisection; 0 where none does."""
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
