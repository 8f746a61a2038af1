"""Rounds, ratios, warm-up and memory; where a test needs a clock it is one that the test sets."""

from __future__ import annotations

import os
import subprocess
import time
from typing import ClassVar

import numpy as np
import pytest
import torch

from dglab_utils.errors import LabError
from dglab_utils.measure import timing
from dglab_utils.measure.timing import (
    Work,
    clocks,
    free_memory,
    graphed,
    in_turns,
    interleaved,
    peak_memory,
    ratio,
    refuse_unless_fits,
    seconds,
    warm_up,
)


def test_runs_take_turns():
    calls: list[str] = []
    a, b = interleaved(lambda: calls.append("a"), lambda: calls.append("b"), pairs=3, warmup=1)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert a.shape == b.shape == (3,)
    assert (a > 0).all()


def test_the_ratio_is_taken_pair_by_pair():
    b = np.array([1.0, 10.0, 100.0, 1000.0, 3.0])  # a machine whose speed drifts
    found = ratio(1.2 * b, b)
    assert (found.median, found.low, found.high) == pytest.approx((1.2, 1.2, 1.2))


def test_the_interval_covers_the_truth():
    covered = 0
    for seed in range(200):
        noise = np.random.default_rng(seed)
        b = noise.lognormal(0, 0.5, 25)
        found = ratio(1.1 * b * noise.lognormal(0, 0.1, 25), b, draws=500)
        covered += found.low <= 1.1 <= found.high
    assert 0.9 <= covered / 200 <= 0.99


def test_an_interval_needs_pairs():
    with pytest.raises(LabError, match="at least 2"):
        interleaved(lambda: None, lambda: None, pairs=1)
    with pytest.raises(LabError, match="as many of each"):
        ratio(np.ones(3), np.ones(2))


# -- what is not timed ---------------------------------------------------------------------------------------


def test_putting_back_is_not_timed():
    state = []
    slow = Work(lambda: state.append("run"), before=lambda: time.sleep(0.02) or state.append("back"))
    times = in_turns({"slow": slow}, rounds=3, warmup=1)
    assert state == ["back", "run"] * 4
    assert (times["slow"] < 0.02).all()


def test_each_round_is_told_once():
    told = []
    in_turns({"a": lambda: None, "b": lambda: None}, rounds=4, warmup=2, each_round=lambda: told.append(1))
    assert len(told) == 4


def test_warming_up_ends_when_times_are_stable(monkeypatch):
    durations = iter([9.0, 5.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(timing, "seconds", lambda run, device: next(durations))
    # The median of runs 6 to 8 is that of runs 3 to 5 (3, 1, 1).
    assert warm_up({"a": Work(lambda: None)}) == (8, True)


def test_warming_up_gives_up(monkeypatch):
    growing = iter(range(1, 1000))
    monkeypatch.setattr(timing, "seconds", lambda run, device: float(next(growing) ** 3))
    assert warm_up({"a": Work(lambda: None)}, most=8) == (8, False)
    assert warm_up({"a": Work(lambda: None)}, budget_s=0.0) == (1, False)


class FakeEvent:
    """Notes what is called on the device, in order."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "stream of cuda"
        self.log.append("record")

    def elapsed_time(self, end):
        return 250.0


@pytest.fixture
def fake_gpu(monkeypatch):
    FakeEvent.log = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: FakeEvent.log.append("synchronize"))
    return FakeEvent.log


def test_a_gpu_is_timed_between_events_from_an_empty_queue(fake_gpu):
    assert seconds(lambda: fake_gpu.append("run"), "cuda") == 0.25
    assert fake_gpu == ["synchronize", "record", "run", "record", "synchronize"]


def test_the_cache_is_flushed_before_the_clock_starts(fake_gpu, monkeypatch):
    class Buffer:
        def zero_(self):
            fake_gpu.append("flush")

    monkeypatch.setattr(timing, "_flush_buffer", lambda device: Buffer())
    in_turns({"a": lambda: fake_gpu.append("run")}, rounds=2, warmup=0, device="cuda", flush=True)
    assert fake_gpu == ["flush", "synchronize", "record", "run", "record", "synchronize"] * 2


# -- memory and what only a GPU has --------------------------------------------------------------------------


def test_peak_memory_counts_what_lives_at_once():
    def two_of_three():
        a = torch.zeros(1000, 1000)
        b = a + 1
        del a
        return b * 2

    assert peak_memory(two_of_three) == pytest.approx(8e6, rel=0.01)


def test_what_does_not_fit_is_told_with_both_numbers(monkeypatch):
    monkeypatch.setattr(timing, "free_memory", lambda device: 1000)
    refuse_unless_fits(1000, "cpu", "this")
    with pytest.raises(LabError, match="toy at batch 3 needs 1,001 bytes on cpu, 1,000 are free"):
        refuse_unless_fits(1001, "cpu", "toy at batch 3")


def test_free_memory_is_less_than_all_there_is():
    assert 0 < free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_cpu_has_neither_graphs_nor_clocks():
    with pytest.raises(LabError, match="only a CUDA device has them"):
        graphed(lambda: None, "cpu")
    assert clocks("cpu") == {}


def test_clocks_are_read_by_name(monkeypatch):
    asked = []

    def answer(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(
            command, 0, "1980 MHz, 3201 MHz, 1980 MHz, 41, 310.20 W, 0x0000000000000000\n"
        )

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setattr("shutil.which", lambda name: name)
    found = clocks("cuda:1")
    assert asked[0][1] == "--id=1"
    assert found["clocks.sm"] == "1980 MHz"
    assert found["clocks_event_reasons.active"] == "0x0000000000000000"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a memory object"), True),
        (RuntimeError("tensors in shared memory have other shapes"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_has_many_words(error, told):
    assert timing.out_of_memory(error) == told
