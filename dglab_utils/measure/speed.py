"""What a denoising step costs against an autoregressive token, on the same weights.

    costs = step_costs(model, batch=1, context=64, rounds=15)
    ratio(costs["canvas step"], costs["token step"])            # the cost ratio
    speedup(16, costs["canvas step"], costs["token step"])      # of a 256-token canvas in 16 steps

One figure decides block diffusion's speed: N steps make a canvas of L tokens, so it gains

    L x (cost of a token) / (N x (cost of a step) + cost of reading the finished canvas)

where the last term is often left out; `speedup` takes it when it is given.

What costs time and no arithmetic (Python, launches) is measured on a hollow model: the same layers, each so narrow that
there is nothing to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from dglab_utils.errors import LabError
from dglab_utils.measure.timing import Run, Work, in_turns, refuse_unless_fits, unless_out_of_memory
from dglab_utils.models.decoding import CanvasStepper, TokenStepper, bytes_needed, parameters_of
from dglab_utils.models.random_weights import build_in_place
from dglab_utils.models.shapes import Shape, as_device, as_dtype, build

SCOPES = ("body", "forward", "step")
WORKS = (*(f"canvas {scope}" for scope in SCOPES), *(f"token {scope}" for scope in SCOPES), "append", "prefill")


def works(
    model: DiffusionGemmaForBlockDiffusion,
    *,
    batch: int = 1,
    context: int = 64,
    seed: int = 0,
    compiled: bool = False,
    names: Iterable[str] = ("canvas step", "token step"),
) -> dict[str, Work]:
    """What is timed, by name, on random prompts of one length.

    Args:
        context: tokens in front of the canvas, or in the cache of the token's step; at least 2.
        compiled: of the steps; see `models.decoding`.
        names: of WORKS. `append` reads a finished canvas into the cache, `prefill` reads the prompt into an empty one.

    Raises:
        LabError: an unknown name, or a batch or context that cannot be.
    """
    names = tuple(names)
    if unknown := set(names) - set(WORKS):
        raise LabError(f"no work {sorted(unknown)[0]!r}; there are {', '.join(WORKS)}")
    if batch < 1 or context < 2:
        raise LabError(f"batch {batch}, context {context}: want at least 1 row and 2 tokens")
    vocabulary = model.config.text_config.vocab_size
    drawn = torch.randint(2, vocabulary - 3, (batch, context + 1), generator=torch.Generator().manual_seed(seed))
    prompt = drawn.to(model.device)
    torch.manual_seed(seed)
    found: dict[str, Work] = {}
    if any(name.startswith(("canvas", "append")) for name in names):
        canvas = CanvasStepper(model, prompt[:, :context], compiled=compiled)
        canvas.step()  # the first step of a canvas has no self-conditioning; all others have
        canvas.mark()
        found |= {f"canvas {scope}": Work(getattr(canvas, scope), canvas.rewind) for scope in SCOPES}
        found["append"] = Work(canvas.append, canvas.rewind)
    if any(name.startswith("token") for name in names):
        token = TokenStepper(model, prompt, compiled=compiled)  # the last token is its input, the others are cached
        found |= {f"token {scope}": Work(getattr(token, scope), token.rewind) for scope in SCOPES}
    if "prefill" in names:
        found["prefill"] = Work(CanvasStepper(model, prompt[:, :context]).prefill)
    return {name: found[name] for name in names}


def step_costs(
    model: DiffusionGemmaForBlockDiffusion,
    *,
    rounds: int,
    warmup: int | None = None,
    batch: int = 1,
    context: int = 64,
    seed: int = 0,
    compiled: bool = False,
    names: Iterable[str] = ("canvas step", "token step"),
    flush: bool = False,
    each_round: Run | None = None,
) -> dict[str, np.ndarray]:
    """Seconds of each work, `[rounds]`, run in turns after a warm-up. Arguments as of `works` and `timing.in_turns`."""
    timed = works(model, batch=batch, context=context, seed=seed, compiled=compiled, names=names)
    return in_turns(timed, rounds=rounds, warmup=warmup, device=model.device, flush=flush, each_round=each_round)


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: a shape at a batch and a context (tokens in front of the canvas).

    A configuration in place of a named shape is built where it runs, without a copy on the host (`random_weights`).
    """

    shape: Shape | DiffusionGemmaConfig
    batch: int = 1
    context: int = 64

    def bytes_needed(self, device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
        """(all of it, the weights alone) while the cell is built and timed."""
        named = isinstance(self.shape, Shape)
        config = self.shape.config() if isinstance(self.shape, Shape) else self.shape
        weight_bytes = 4 if named and device.type == "cpu" else dtype.itemsize
        whole = bytes_needed(config, batch=self.batch, context=self.context, weight_bytes=weight_bytes, dtype=dtype)
        return whole, weight_bytes * parameters_of(config)

    def build(self, device: torch.device, dtype: torch.dtype) -> DiffusionGemmaForBlockDiffusion:
        """A model of the cell's shape with random weights."""
        if isinstance(self.shape, Shape):
            return build(self.shape, device=device, dtype=dtype)
        return build_in_place(self.shape, device=device, dtype=dtype)

    def __str__(self) -> str:
        name = self.shape.name if isinstance(self.shape, Shape) else "the configuration"
        return f"{name} at batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Measured:
    """A cell with its costs, or with the reason why there are none."""

    cell: Cell
    costs: dict[str, np.ndarray] | None
    refused: str = ""


def sweep(
    cells: Iterable[Cell],
    *,
    rounds: int,
    warmup: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = "float32",
    names: Iterable[str] = ("canvas step", "token step"),
    flush: bool = False,
) -> Iterator[Measured]:
    """The cells in order, each with its costs; a model is built anew where the shape changes.

    A cell that does not fit into memory is refused before anything is allocated; one that runs out of it in the middle
    is marked. The sweep goes on after either.
    """
    names, device, dtype = tuple(names), as_device(device), as_dtype(dtype)
    model, built = None, None
    for cell in cells:
        # Official configurations cannot be compared: one that differs from layer to layer refuses to be read.
        if not (cell.shape is built or (isinstance(cell.shape, Shape) and cell.shape == built)):
            model, built = None, None  # freed before the next is held against what is free
        whole, weights = cell.bytes_needed(device, dtype)
        try:
            refuse_unless_fits(whole if model is None else whole - weights, device, str(cell))
        except LabError as refusal:
            yield Measured(cell, None, str(refusal))
            continue

        def measure(cell: Cell = cell) -> dict[str, np.ndarray]:
            nonlocal model, built
            if model is None:
                model, built = cell.build(device, dtype), cell.shape
            return step_costs(
                model,
                rounds=rounds,
                warmup=warmup,
                batch=cell.batch,
                context=cell.context,
                names=names,
                flush=flush,
            )

        costs = unless_out_of_memory(measure)
        yield Measured(cell, costs, "" if costs is not None else "ran out of memory")


def speedup(
    steps: int, canvas: np.ndarray, token: np.ndarray, *, append: np.ndarray | float = 0.0, canvas_length: int = 256
) -> np.ndarray:
    """`[rounds]`: tokens a second of block diffusion over those of autoregression, for a canvas in `steps` steps.

    Args:
        canvas, token: seconds of a denoising step and of an autoregressive step, `[rounds]`, both of the same batch.
        append: seconds of reading the finished canvas into the cache.
    """
    return canvas_length * token / (steps * canvas + append)


def hollow(shape: Shape) -> Shape:
    """The same layers with next to nothing in them: what is left is the price of launching and of Python."""
    return replace(
        shape,
        name=f"{shape.name}, hollow",
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        mlp_width=32,
        expert_width=16,
        vocab=64,
        canvas_length=1,
    )
