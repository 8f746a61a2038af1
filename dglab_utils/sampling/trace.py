"""CanvasTrace: everything that happened to one canvas of one row, step by step.

One denoising step of the official loop, in the names used here (generation_diffusion_gemma.py, `_denoising_step`):

    current   the canvas that enters the step: what the decoder reads
    sampled   one candidate a position, drawn from the softmax of the tempered logits
    argmax    the most likely token a position; the last one is the answer
    entropy   of the tempered distribution, nats
    accepted  the positions whose candidate is kept for the next step; every other position is redrawn at random

"Accepted" promises nothing: the mask is computed afresh at every step, and a position that was accepted can be
drawn at random in the next one. What follows from these arrays is computed by the methods and never stored.

The record knows nothing of models: it is numpy arrays and a dictionary of plain values.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from dglab_utils.errors import LabError
from dglab_utils.paths import written

SCHEMA = 1

# Axes and numpy kind (b bool, i int, f float) of each array; S = steps, L = canvas length, P = prompt, V = vocabulary.
LAYOUT = {
    **dict.fromkeys(("current", "argmax", "sampled"), ("SL", "i")),
    "entropy": ("SL", "f"),
    "accepted": ("SL", "b"),
    **dict.fromkeys(("temperature", "mean_entropy"), ("S", "f")),
    **dict.fromkeys(("stable", "confident"), ("S", "b")),
    "output": ("L", "i"),
    "prompt": ("P", "i"),
    "logits": ("SLV", "f"),
}


@dataclass(frozen=True)
class CanvasTrace:
    """One denoised canvas of one row.

    Arrays have one row per denoising step this canvas really took: a row that finished before its batch
    neighbours ends there. S = steps, L = canvas length, V = vocabulary.

    Attributes:
        current: [S, L] int32, the canvas entering the step.
        argmax: [S, L] int32, the most likely token.
        sampled: [S, L] int32, the candidate drawn.
        entropy: [S, L] float32, nats, of the tempered distribution.
        accepted: [S, L] bool.
        temperature: [S] float32; NaN where no temperature schedule ran.
        mean_entropy: [S] float32, nats, as the stop test computed it.
        stable: [S] bool, the argmax canvas equals the last `stability_threshold` ones.
        confident: [S] bool, the mean entropy is below `confidence_threshold`.
        output: [L] int32, what `generate()` returned for this canvas: the last argmax, padded after an EOS.
        prompt: [P] int32, what `generate()` was given for the row, left padding removed; with a cache from an earlier
            turn only what that cache does not hold.
        settings: sampler settings, plain values: `max_denoising_steps`, `entropy_bound`, `t_min`, `t_max`,
            `stability_threshold`, `confidence_threshold`, `vocab_size`, `pad_token_id`, `eos_token_id`.
        row, canvas: index of the row in its batch, and of the canvas in its row.
        stopped: the stop test ended the canvas; False when the cap on steps did.
        ended_before: an EOS, or another stopping criterion, had ended the row in an earlier canvas. `generate()`
            denoises such a canvas with its batch, does not count its forwards, and replaces the whole of it with
            padding where there is a padding token.
        seed, model, dtype, device: what was run; `seed` is None where the caller did not give one.
        logits: [S, L, V] float32, tempered, or None; kept on request only.
    """

    current: np.ndarray
    argmax: np.ndarray
    sampled: np.ndarray
    entropy: np.ndarray
    accepted: np.ndarray
    temperature: np.ndarray
    mean_entropy: np.ndarray
    stable: np.ndarray
    confident: np.ndarray
    output: np.ndarray
    prompt: np.ndarray
    settings: dict[str, Any] = field(default_factory=dict)
    row: int = 0
    canvas: int = 0
    stopped: bool = False
    ended_before: bool = False
    seed: int | None = None
    model: str = ""
    dtype: str = ""
    device: str = ""
    logits: np.ndarray | None = None

    # -- size ------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Denoising steps this canvas took; each is one decoder forward."""
        return self.current.shape[0]

    @property
    def canvas_length(self) -> int:
        return self.current.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self._arrays().values())

    # -- what was accepted, and when -------------------------------------------------------------------------

    @cached_property
    def commits_per_step(self) -> np.ndarray:
        """[S] positions accepted in each step."""
        return self.accepted.sum(axis=1)

    @property
    def commits_per_forward(self) -> float:
        """Accepted positions over decoder forwards: what the entropy bound lets through."""
        return float(self.commits_per_step.mean())

    @property
    def official_tokens_per_forward(self) -> float:
        """This canvas's share of the `tokens_per_forward` that `generate()` reports: its non-pad tokens over its
        decoder forwards. It counts output length, not acceptance. NaN for a canvas after the end, whose forwards
        `generate()` does not count.
        """
        if self.ended_before:
            return float("nan")
        pad = self.settings.get("pad_token_id")
        kept = self.canvas_length if pad is None else int((self.output != pad).sum())
        return kept / self.steps

    @cached_property
    def accept_transitions(self) -> np.ndarray:
        """[2, 2] counts over all positions and successive steps: rows = not accepted, accepted at step s;
        columns = the same at step s + 1. Entry [1, 0] counts un-accepts.
        """
        before, after = self.accepted[:-1].ravel(), self.accepted[1:].ravel()
        return np.array([[np.sum((before == b) & (after == a)) for a in (False, True)] for b in (False, True)])

    @property
    def unaccepted_share(self) -> float:
        """Of the positions accepted in a step, the share that the next step did not accept; NaN for one step."""
        accepted_before = self.accept_transitions[1].sum()
        return float(self.accept_transitions[1, 0] / accepted_before) if accepted_before else float("nan")

    @property
    def argmax_changed_share(self) -> float:
        """Share of positions whose argmax differs from the step before, mean over steps; NaN for one step."""
        return float((self.argmax[1:] != self.argmax[:-1]).mean()) if self.steps > 1 else float("nan")

    @cached_property
    def first_accept(self) -> np.ndarray:
        """[L] step (from 0) that first accepted the position; -1 where none did."""
        return np.where(self.accepted.any(axis=0), self.accepted.argmax(axis=0), -1)

    @cached_property
    def final_change(self) -> np.ndarray:
        """[L] step (from 0) from which the argmax token is the final one; 0 where it was so from the start."""
        differs = self.argmax != self.argmax[-1]
        last_different = self.steps - 1 - differs[::-1].argmax(axis=0)
        return np.where(differs.any(axis=0), last_different + 1, 0)

    @property
    def order_against_position(self) -> float:
        """Kendall tau-b between position and first-accept step, over accepted positions: 1 when the canvas fills
        left to right, 0 with no order. NaN when all were accepted in the same step.
        """
        seen = self.first_accept >= 0
        return float(kendalltau(np.flatnonzero(seen), self.first_accept[seen], variant="b").statistic)

    @property
    def entropy_at_acceptance(self) -> np.ndarray:
        """[accepted positions] nats, the entropy of each position at the step that first accepted it."""
        seen = np.flatnonzero(self.first_accept >= 0)
        return self.entropy[self.first_accept[seen], seen]

    @cached_property
    def kl_to_final(self) -> np.ndarray:
        """[S, L] nats, KL(p_s || p_final) of the tempered distributions: how far the step was from the last.

        Raises:
            LabError: the trace was recorded without its logits.
        """
        if self.logits is None:
            raise LabError("kl_to_final needs the logits: record the trace with observe(model, keep_logits=True)")
        log_p = self.logits.astype(np.float64)
        log_p -= np.logaddexp.reduce(log_p, axis=-1, keepdims=True)
        probability = np.exp(log_p)
        # A token that cannot occur (probability 0, log -inf) adds nothing, though -inf less -inf is no number.
        gap = np.subtract(log_p, log_p[-1], out=np.zeros_like(log_p), where=probability > 0)
        return np.sum(probability * gap, axis=-1)

    # -- on disk ---------------------------------------------------------------------------------------------

    def first(self, count: int) -> CanvasTrace:
        """The first `count` positions of the same canvas, so that padding behind an answer is not counted with it.

        The stop test's `mean_entropy`, `stable` and `confident` stay those of the whole canvas.
        """
        cut = {
            name: getattr(self, name)[..., :count] for name in ("current", "argmax", "sampled", "entropy", "accepted")
        }
        logits = None if self.logits is None else self.logits[:, :count]
        return replace(self, **cut, output=self.output[:count], logits=logits)

    def digest(self) -> str:
        """SHA-256 over all arrays, logits left out: equal traces have equal digests on one machine."""
        names = sorted(name for name in self._arrays() if name != "logits")
        return hashlib.sha256("".join(name + self.digest_of(name) for name in names).encode()).hexdigest()

    def digest_of(self, name: str) -> str:
        """SHA-256 of one array: its type, shape and bytes."""
        array = np.ascontiguousarray(getattr(self, name))
        return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()

    def save(self, path: str | Path) -> Path:
        """Writes one `.npz`, under a temporary name first."""
        path = Path(path)
        if path.suffix != ".npz":
            raise LabError(f"{path}: a trace is saved as .npz; give a name that ends so")
        meta = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in self._arrays() and f.name != "logits"
        }
        with written(path) as temporary:
            # Not compressed: random tokens hardly shrink, and saving is to cost nothing beside a run.
            np.savez(temporary, meta=np.array(json.dumps({"schema": SCHEMA, **meta})), **self._arrays())  # type: ignore[arg-type]
        return path

    @classmethod
    def load(cls, path: str | Path) -> CanvasTrace:
        """Reads what `save` wrote.

        Raises:
            LabError: no such file, a damaged or foreign one, arrays that do not fit each other, or another schema.
        """
        path = Path(path)
        try:
            with np.load(path, allow_pickle=False) as archive:
                content = {name: archive[name] for name in archive.files}
            meta = json.loads(str(content.pop("meta")))
            schema = meta.pop("schema")
            if schema != SCHEMA:
                raise LabError(f"{path}: trace schema {schema}, this version reads {SCHEMA}: record it again")
            trace = cls(**content, **meta)
            trace._check()
        except FileNotFoundError:
            raise LabError(f"{path}: no such trace; record one with observe(model) and save it") from None
        except LabError:
            raise
        except Exception as error:  # zipfile, zlib, numpy's header parser, json: a damaged file can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise LabError(f"{path}: not a readable trace ({reason}); the file is damaged, record it again") from error
        return trace

    def _check(self) -> None:
        """Raises ValueError where a field is not what the class says it is: for what comes from a file."""
        sizes: dict[str, int] = {}
        for name, (axes, kind) in LAYOUT.items():
            array = getattr(self, name)
            if name == "logits" and array is None:
                continue
            if not isinstance(array, np.ndarray) or array.ndim != len(axes) or array.dtype.kind != kind:
                raise ValueError(f"{name} is not [{', '.join(axes)}] of kind {kind}")
            for axis, size in zip(axes, array.shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has {axis} = {size}, other arrays {sizes[axis]}")
        if not (sizes["S"] and sizes["L"]):
            raise ValueError("it has no steps or no positions")
        if not isinstance(self.settings, dict):
            raise ValueError("settings is not a dictionary")

    def _arrays(self) -> dict[str, np.ndarray]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), np.ndarray)}
