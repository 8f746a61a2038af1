"""Canvases for the tests: random ones, which no real run is worse than, and what the viewer should say of them."""

from __future__ import annotations

import numpy as np

from dglab_utils.sampling.trace import CanvasTrace


def random_canvas(
    steps: int = 48, length: int = 256, vocab_size: int = 1000, seed: int = 0, keep_logits: bool = False
) -> CanvasTrace:
    """Every array drawn uniformly; the current canvas follows from them by the sampler's rule."""
    rng = np.random.default_rng(seed)
    accepted = rng.random((steps, length)) < 0.5
    argmax, sampled, current = rng.integers(0, vocab_size, (3, steps, length), dtype=np.int32)
    current[1:] = np.where(accepted[:-1], sampled[:-1], current[1:])
    entropy = (rng.random((steps, length)) * np.log(vocab_size)).astype(np.float32)
    return CanvasTrace(
        current=current,
        argmax=argmax,
        sampled=sampled,
        entropy=entropy,
        accepted=accepted,
        temperature=np.linspace(0.8, 0.4, steps, dtype=np.float32),
        mean_entropy=entropy.mean(axis=1),
        stable=rng.random(steps) < 0.5,
        confident=rng.random(steps) < 0.5,
        output=argmax[-1],
        prompt=np.arange(3, dtype=np.int32),
        settings={"entropy_bound": 0.1},
        stopped=True,
        logits=rng.normal(size=(steps, length, vocab_size)).astype(np.float32) if keep_logits else None,
    )


def accept_states(trace: CanvasTrace) -> np.ndarray:
    """[S, L] the name of each cell's accept state, from the trace's own arrays."""
    before = np.concatenate([np.zeros_like(trace.accepted[:1]), trace.accepted[:-1]])
    first = trace.first_accept == np.arange(trace.steps)[:, None]
    return np.select([first, trace.accepted, before], ["first", "again", "dropped"], "open")


def scale_error(value: np.ndarray, levels: int) -> np.ndarray:
    """The largest error, in the values' unit, of a square-root scale of `levels` steps that ends at their maximum."""
    top = value.max()
    return top * (np.sqrt(value / top) / levels + 0.25 / levels**2) + 1e-5 * top  # the last for single precision
