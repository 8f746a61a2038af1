"""Timing: how long something takes, how two things compare, and how much memory they want.

Time is read from CUDA events on a GPU and from `perf_counter` on a CPU. What is compared is run in turns, so that a
machine that speeds up or slows down moves every side of a round together; a ratio is then taken round by round, and
its interval is a bootstrap over the rounds. Absolute times of a shared machine mean little, ratios of one run hold.

    times = in_turns({"a": work_a, "b": work_b}, rounds=21)     # seconds, [rounds] each
    print(ratio(times["a"], times["b"]))                        # 1.272 (95% interval 1.250 to 1.301, 21 pairs)

This module knows nothing of models: it is given callables.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dglab_utils.errors import LabError

Run = Callable[[], object]
Device = str | torch.device
T = TypeVar("T")

WINDOW = 3  # rounds whose median is compared with that of the rounds before, while warming up
SETTLED = 0.05  # relative change of that median that counts as stable
FLUSH_BYTES = 256 * 2**20  # what Triton's do_bench overwrites between runs; no GPU's L2 cache is that large


@dataclass(frozen=True)
class Work:
    """What is timed, and what puts things back before each run, which is not timed."""

    run: Run
    before: Run | None = None


@dataclass(frozen=True)
class Ratio:
    """The median of pairwise ratios a/b, and the interval that holds it."""

    median: float
    low: float
    high: float
    level: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.level:.0%} interval {self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


# -- time ----------------------------------------------------------------------------------------------------


def seconds(run: Run, device: Device = "cpu") -> float:
    """Seconds of one call.

    On a GPU the time between two events on its current stream, with an empty queue before: it covers the kernels and
    the gaps in which the GPU waits for a launch, and not the synchronisation itself.
    """
    if torch.device(device).type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        start.record(stream)
        run()
        end.record(stream)
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    wait = torch.mps.synchronize if torch.device(device).type == "mps" else _nothing
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def in_turns(
    works: Mapping[str, Work | Run],
    *,
    rounds: int,
    warmup: int | None = None,
    device: Device = "cpu",
    flush: bool = False,
    each_round: Run | None = None,
) -> dict[str, np.ndarray]:
    """Seconds of each work, `[rounds]` each; every second round runs them in reverse order.

    Args:
        works: name to what is timed.
        rounds: counted rounds, at least 2.
        warmup: rounds run before, not counted; None warms up until stable (`warm_up`).
        flush: overwrite the GPU's L2 cache before each run, so that no run finds its weights there.
        each_round: called after each counted round, such as a progress bar's update.

    Raises:
        LabError: fewer than two rounds.
    """
    if rounds < 2:
        raise LabError(f"rounds={rounds}: an interval needs at least 2")
    ready = {name: work if isinstance(work, Work) else Work(work) for name, work in works.items()}
    if warmup is None:
        warm_up(ready, device=device, flush=flush)
    for _ in range(warmup or 0):
        for work in ready.values():
            _timed(work, device, flush)
    times = {name: np.empty(rounds) for name in ready}
    for turn in range(rounds):
        for name in list(ready) if turn % 2 == 0 else reversed(ready):
            times[name][turn] = _timed(ready[name], device, flush)
        if each_round is not None:
            each_round()
    return times


def interleaved(
    a: Work | Run, b: Work | Run, *, pairs: int, warmup: int | None = 1, device: Device = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of `a` and of `b`, `[pairs]` each, run in turn; every second pair runs b first.

    Args:
        pairs: counted pairs, at least 2.
        warmup: pairs run before, not counted; None warms up until stable.
    """
    times = in_turns({"a": a, "b": b}, rounds=pairs, warmup=warmup, device=device)
    return times["a"], times["b"]


def warm_up(
    works: Mapping[str, Work],
    *,
    most: int = 20,
    budget_s: float = 5.0,
    device: Device = "cpu",
    flush: bool = False,
) -> tuple[int, bool]:
    """Runs all works in turn until their times are stable.

    Stable: for every work the median of the last three runs is within 5 % of that of the three before.

    Args:
        most: rounds after which it gives up, stable or not.
        budget_s: seconds after which it gives up, likewise; the first round is always run, for what it compiles.

    Returns:
        (rounds run, whether they became stable). A busy machine may never be.
    """
    history: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for turn in range(1, most + 1):
        for name, work in works.items():
            history[name].append(_timed(work, device, flush))
        if all(_is_stable(times) for times in history.values()):
            return turn, True
        if time.perf_counter() - began > budget_s:
            break
    return turn, False


def ratio(a: np.ndarray, b: np.ndarray, *, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Ratio:
    """The pairwise ratio a/b of interleaved times, with a percentile bootstrap interval of its median.

    Source of the method: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    if a.shape != b.shape or a.size < 2:
        raise LabError(f"ratio: {a.size} and {b.size} times; want as many of each, at least 2")
    ratios = a / b
    picked = np.random.default_rng(seed).integers(0, ratios.size, (draws, ratios.size))
    medians = np.median(ratios[picked], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high), level, ratios.size)


def _timed(work: Work, device: Device, flush: bool) -> float:
    if work.before is not None:
        work.before()
    if flush and torch.device(device).type == "cuda":
        _flush_buffer(str(device)).zero_()
    return seconds(work.run, device)


def _is_stable(times: list[float]) -> bool:
    if len(times) < 2 * WINDOW:
        return False
    last, before = np.median(times[-WINDOW:]), np.median(times[-2 * WINDOW : -WINDOW])
    return bool(abs(last - before) <= SETTLED * before)


@functools.cache
def _flush_buffer(device: str) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)


def _nothing() -> None:
    """What there is to wait for on a CPU."""


# -- the GPU's own matters -----------------------------------------------------------------------------------


def graphed(run: Run, device: Device) -> Run:
    """`run` captured as a CUDA graph: the returned call replays its kernels with one launch for all of them.

    The replay computes on the tensors of the capture. What the host decides in the middle of `run` (a branch on a
    tensor's value) cannot be captured.

    Raises:
        LabError: no CUDA device, or PyTorch cannot capture this.
    """
    if torch.device(device).type != "cuda":
        raise LabError(f"a CUDA graph on device {str(device)!r}: only a CUDA device has them")
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):  # kernels that are loaded or tuned on first use must be, before the capture
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        raise LabError(f"not capturable as a CUDA graph: {str(error).splitlines()[0]}") from error
    return graph.replay


def clocks(device: Device) -> dict[str, str]:
    """What the GPU's driver says of clocks, temperature, power and throttling now; {} where it does not say.

    Keys are those of `nvidia-smi --help-query-gpu`, values have their units.
    """
    found = torch.device(device)
    if found.type != "cuda" or shutil.which("nvidia-smi") is None:
        return {}
    asked = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--id={found.index or 0}", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(asked.split(","), (value.strip() for value in said.split(",")), strict=False))


# -- memory --------------------------------------------------------------------------------------------------


def peak_memory(run: Run, device: Device = "cpu") -> int:
    """Bytes by which PyTorch's allocations on the device rise, at most, during one call above what is there before."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    with _standard_error_closed():
        profiler.start()
    try:
        run()
    finally:
        with _standard_error_closed():
            profiler.stop()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    balance = np.cumsum([0, *(event.nbytes() for event in events)])  # an allocation counts up, a release down
    return int(balance.max())


@contextmanager
def _standard_error_closed() -> Iterator[None]:
    """What a library writes past Python to the process's standard error is dropped: the profiler tells its start and
    stop there, which would stand in a notebook's output.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def free_memory(device: Device = "cpu") -> int:
    """Bytes that can still be allocated on the device: a GPU's free memory, or what this process may still take."""
    if torch.device(device).type == "cuda":
        # What PyTorch holds in reserve and does not use is free to it.
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: the physical memory is the best bound there is
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # a container's limit, where there is one (cgroup v2)
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def refuse_unless_fits(
    needed: int, device: Device, what: str, remedy: str = "take a smaller size, batch or context"
) -> None:
    """Refuses, before anything is allocated, what will not fit into the memory that is free.

    Raises:
        LabError: names `what`, the bytes needed and the bytes free.
    """
    free = free_memory(device)
    if needed > free:
        raise LabError(f"{what} needs {needed:,} bytes on {device}, {free:,} are free; {remedy}")


def out_of_memory(error: Exception) -> bool:
    """Whether this is an allocation that failed. PyTorch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    words = ("out of memory", "allocate memory", "alloc_failed", "bad_alloc", "could not create a memory object")
    return isinstance(error, RuntimeError) and any(word in said for word in words)


def unless_out_of_memory(measure: Callable[[], T]) -> T | None:
    """What `measure` returns; None when memory runs out in the middle, so that a sweep can mark the cell and go on."""
    try:
        return measure()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
