"""What makes the rows of a batch independent of each other on this device, and what that costs.

    fix = minimal_fix(model, prompts[:1], batch=4)    # settings that are enough for one request, cheapest first
    confirmed(model, fix, prompts, batch=4)           # the cheapest that is enough for all, to the end

Two kinds of remedy: switches that Transformers and PyTorch have already, and parts of the model computed row by row
(`measure.rowwise`). Whether one is enough is asked of `measure.invariance`, by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dglab_utils.errors import LabError
from dglab_utils.measure.invariance import capped, check_batch, generate_pinned, protocol, row_seeds
from dglab_utils.measure.rowwise import ALL, cut, modules_of, parts_of, row_wise
from dglab_utils.measure.timing import Ratio, in_turns, out_of_memory, ratio

SEARCH_STEPS = 2  # denoising steps, or tokens, that ways are tried and timed on


@dataclass(frozen=True)
class Setting:
    """A way to run a model.

    Attributes:
        parts: computed row by row.
        experts, attention: implementation that Transformers is told to use; None leaves its own.
        deterministic: `torch.use_deterministic_algorithms`.
        plain_kernels: PyTorch's own kernels on a CPU, not oneDNN's.
    """

    parts: tuple[str, ...] = ()
    experts: str | None = None
    attention: str | None = None
    deterministic: bool = False
    plain_kernels: bool = False

    def __str__(self) -> str:
        told = [f"{part} row by row" for part in self.parts]
        told += [f"experts: {self.experts}"] if self.experts else []
        told += [f"attention: {self.attention}"] if self.attention else []
        told += ["deterministic algorithms"] if self.deterministic else []
        told += ["without oneDNN"] if self.plain_kernels else []
        return ", ".join(told) or "plain batch"

    @property
    def code(self) -> list[str]:
        """Lines of Python that run a model this way."""
        told = [f"model.set_experts_implementation({self.experts!r})"] if self.experts else []
        told += [f"model.set_attn_implementation({self.attention!r})"] if self.attention else []
        told += ["torch.use_deterministic_algorithms(True, warn_only=True)"] if self.deterministic else []
        told += ["torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)"] if self.plain_kernels else []
        inside = f"with dglab_utils.measure.rowwise.row_wise(model, {list(self.parts)}): model.generate(...)"
        return told + ([inside] if self.parts else [])

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside, the model runs this way; after, as before."""
        experts = getattr(model.config, "_experts_implementation", None)  # models without experts have none
        attention = model.config._attn_implementation
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        with ExitStack() as stack:
            if self.experts:
                model.set_experts_implementation(self.experts)
                stack.callback(model.set_experts_implementation, experts)
            if self.attention:
                model.set_attn_implementation(self.attention)
                stack.callback(model.set_attn_implementation, attention)
            if self.deterministic:
                torch.use_deterministic_algorithms(True, warn_only=True)
                stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
            if self.plain_kernels:  # not `flags`, which sets three more
                was_enabled, *_ = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)
                stack.callback(torch.backends.mkldnn.set_flags, was_enabled, _fp32_precision=None)
            stack.enter_context(row_wise(model, self.parts) if self.parts else nullcontext())
            yield


@dataclass(frozen=True)
class Fix:
    """What `minimal_fix` found.

    Attributes:
        ways: settings that make every row equal its single run, here, and need all that they have; cheapest first.
        times: seconds of the same work, `[rounds]` each, by name: of the ways, the plain batch, and ONE_BY_ONE.
        tried: every setting tried: whether it was enough; None where this device or model cannot run it.
    """

    ways: tuple[Setting, ...]
    times: dict[str, np.ndarray]
    tried: dict[Setting, bool | None]

    def over_plain(self, way: str) -> Ratio:
        """Time of a way, by its name, over that of the plain batch, pair by pair."""
        return ratio(self.times[way], self.times[str(Setting())])


def holds(
    model: PreTrainedModel,
    setting: Setting,
    prompts: Tensor,
    *,
    batch: int = 4,
    seeds: Sequence[int] | None = None,
    **settings: Any,
) -> bool:
    """Whether, run this way, every prompt has the values of its single run in every placement of the protocol.

    The single run is run this way too: a switch may change the values, as long as it changes them for all.
    """
    with setting.on(model):
        return all(found.same for found in protocol(model, prompts, batch=batch, seeds=seeds, **settings))


def switches(model: PreTrainedModel) -> list[Setting]:
    """The plain batch, and each switch of Transformers or PyTorch that may make rows independent on this device."""
    experts = getattr(model.config, "_experts_implementation", None)
    told = [Setting()]
    if "experts" in parts_of(model):
        told += [Setting(experts=name) for name in ("eager", "grouped_mm", "batched_mm") if name != experts]
    told += [Setting(attention=name) for name in ("eager", "sdpa") if name != model.config._attn_implementation]
    told += [Setting(plain_kernels=True)] if model.device.type == "cpu" else []
    return [*told, Setting(deterministic=True)]


# What a switch raises that does not work here: Transformers a ValueError where a model has no such implementation,
# PyTorch a RuntimeError where a device or a dtype has no such kernel.
_CANNOT = (RuntimeError, ValueError)


def minimal_fix(
    model: PreTrainedModel,
    prompts: Tensor,
    *,
    batch: int = 4,
    seeds: Sequence[int] | None = None,
    steps: int = SEARCH_STEPS,
    rounds: int = 5,
    each: Callable[[Setting, bool | None], object] = lambda *_: None,
    **settings: Any,
) -> Fix:
    """The cheapest ways to run a batch on this device in which every row equals its single run.

    Parts computed row by row are tried first: all of them, then one after the other is left out where the rest is
    enough. Then each switch, by itself and with fewer of those parts. What is enough is timed in turns. "All" parts row
    by row are always among it, unless the switches of a backend undo even that.

    Args:
        prompts: `[N, P]` to try on, such that the plain batch differs; what is enough for few may not be for others:
            see `confirmed`.
        seeds: of each prompt's noise; None for those of `row_seeds`.
        steps: cap to try and to time with, denoising steps or tokens; where the plain batch shows no difference with
            it, nothing is capped while trying. Where it shows none then either, nothing else is tried.
        rounds: timings of each.
        each: called with each setting tried.
        settings: of `generate()`.
    """
    check_batch(prompts, batch)
    few = settings | capped(model, _at_most(steps, settings))
    tried: dict[Setting, bool | None] = {}

    def enough(setting: Setting) -> bool:
        if setting not in tried:
            try:
                tried[setting] = holds(model, setting, prompts, batch=batch, seeds=seeds, **few)
            except _CANNOT as error:
                if setting == Setting(parts=setting.parts) or isinstance(error, LabError) or out_of_memory(error):
                    raise  # no switch is to blame
                tried[setting] = None
            each(setting, tried[setting])
        return bool(tried[setting])

    if enough(Setting()):
        few = settings
        del tried[Setting()]
        if enough(Setting()):
            return Fix((), {}, tried)
    minimal: list[Setting] = []
    kept = tuple(part for part in parts_of(model) if part != ALL)
    for switch in switches(model):  # the plain batch first: what it needs is where the others begin
        if enough(switch):
            minimal.append(switch)
            continue
        if tried[switch] is None or not enough(replace(switch, parts=kept)):
            continue
        needed = kept
        for part in kept:
            fewer = tuple(other for other in needed if other != part)
            if fewer and enough(replace(switch, parts=fewer)):
                needed = fewer
        if switch == Setting():
            kept = needed
        if switch == Setting() or needed != kept:  # else the switch adds nothing to the parts
            minimal.append(replace(switch, parts=needed))
    if enough(Setting(parts=(ALL,))):
        minimal.append(Setting(parts=(ALL,)))
    if not minimal:
        return Fix((), {}, tried)
    timed = settings | capped(model, _at_most(steps, settings))
    row_seed = None if seeds is None else seeds[0]
    times = cost(model, minimal, prompts[:1], batch=batch, rounds=rounds, row_seed=row_seed, **timed)
    ways = sorted(dict.fromkeys(minimal), key=lambda setting: float(np.median(times[str(setting)])))
    return Fix(tuple(ways), times, tried)


def _at_most(steps: int, settings: dict[str, Any]) -> int:
    """So many steps, or the cap of the settings where that is lower."""
    return min([steps, *(settings[name] for name in ("max_denoising_steps", "max_new_tokens") if name in settings)])


def confirmed(model: PreTrainedModel, fix: Fix, prompts: Tensor, *, batch: int = 4, **settings: Any) -> Setting | None:
    """The cheapest way of a fix in which all these prompts have the values of their single runs; None where none has.

    Args:
        prompts: `[N, P]` token ids.
        settings: of `holds` and `generate()`; best those of the deployment.
    """
    return next((way for way in fix.ways if holds(model, way, prompts, batch=batch, **settings)), None)


ONE_BY_ONE = "one row after the other"


def cost(
    model: PreTrainedModel,
    ways: Sequence[Setting],
    prompt: Tensor,
    *,
    batch: int,
    rounds: int = 5,
    row_seed: int | None = None,
    **settings: Any,
) -> dict[str, np.ndarray]:
    """Seconds to generate for a batch of copies, `[rounds]` for each way, the plain batch, and ONE_BY_ONE, in turns.

    Args:
        prompt: `[1, P]` token ids.
        row_seed: of the prompt's noise; None for that of `row_seeds`.
        settings: of `generate()`; for the same work in each, set a cap that all of them reach.
    """
    check_batch(prompt, max(batch, 2))
    seeds = [row_seeds(1)[0] if row_seed is None else row_seed] * batch

    def whole(setting: Setting) -> None:
        with setting.on(model):
            generate_pinned(model, prompt.repeat(batch, 1), seeds, settings)

    def one_by_one() -> None:
        for row_seed in seeds:
            generate_pinned(model, prompt, [row_seed], settings)

    works: dict[str, Callable[[], None]] = {
        str(setting): partial(whole, setting) for setting in dict.fromkeys((Setting(), *ways))
    }
    return in_turns(works | {ONE_BY_ONE: one_by_one}, rounds=rounds, warmup=1, device=model.device)


@dataclass(frozen=True)
class Calls:
    """What a part is called for in a generation, and what a call costs: why row by row costs what it does.

    Attributes:
        count: calls in the generation.
        whole, row: seconds of the last of them, `[rounds]`: for the batch at once, and for one of its rows.
        rows: of the batch.
    """

    count: int
    whole: np.ndarray
    row: np.ndarray
    rows: int

    @property
    def more(self) -> float:
        """Seconds that calling it for each row adds to the generation, by the medians of one call."""
        return self.count * float(self.rows * np.median(self.row) - np.median(self.whole))


def calls_of(
    model: PreTrainedModel, part: str, prompt: Tensor, *, batch: int, rounds: int = 15, **settings: Any
) -> Calls:
    """Times a part's call for a batch of copies and for one row.

    The last call stands for all. The product of self-conditioning, which is no module, is not in it.

    Args:
        part: of `rowwise.PARTS`, but "all" and "attention", whose calls fill a cache.
        prompt: `[1, P]` token ids.
        settings: of `generate()`.
    """
    check_batch(prompt, batch)
    if part in (ALL, "attention"):
        raise LabError(f"calls of {part}: they fill a cache, and cannot be repeated to be timed")
    seen: list[tuple[torch.nn.Module, tuple, dict[str, Any]]] = []
    count = 0

    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        seen[:] = [(module, args, kwargs)]

    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in modules_of(model, part)]
    try:
        generate_pinned(model, prompt.repeat(batch, 1), row_seeds(1) * batch, settings)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise LabError(f"{type(model).__name__}: {part} is not called")
    module, args, kwargs = seen[0]
    own_args, own_kwargs = cut((args, kwargs), 0, batch, {})
    with torch.no_grad():
        works = {"whole": lambda: module(*args, **kwargs), "row": lambda: module(*own_args, **own_kwargs)}
        taken = in_turns(works, rounds=rounds, warmup=3, device=model.device)
    return Calls(count, taken["whole"], taken["row"], batch)
