"""What watching costs: `observe` around `generate()` on the 17M toy, and keeping the trace.

    python benchmarks/tracing.py                  # the targets: time <= 1.05, memory <= 2, save and read < 50 ms
    python benchmarks/tracing.py --save           # also writes data/results/<host>/bench_tracing.json

Time is a ratio of interleaved pairs within one run. Memory is the growth of the peak resident size of a process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from dglab_utils.measure.timing import interleaved, ratio, seconds
from dglab_utils.models import build
from dglab_utils.paths import RECORDED_RESULTS
from dglab_utils.report.results import Results
from dglab_utils.sampling.observe import observe
from dglab_utils.sampling.trace import CanvasTrace


def main() -> int:
    """Measures, prints, and returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="toy-17m", help="the model (default: toy-17m)")
    parser.add_argument("--steps", type=int, default=6, help="denoising steps a run (default: 6)")
    parser.add_argument("--pairs", type=int, default=15, help="traced and untraced runs (default: 15)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--save", action="store_true", help="write data/results/<host>/bench_tracing.json")
    asked = parser.parse_args()

    model = build(asked.shape, device=asked.device)
    prompt = torch.randint(2, 1000, (1, 64), generator=torch.Generator().manual_seed(0)).to(asked.device)
    results = Results.begin("bench_tracing", {k: v for k, v in vars(asked).items() if k != "save"})
    bar = tqdm(total=2 * (asked.pairs + 1), desc="runs")

    def untraced() -> None:
        torch.manual_seed(0)
        model.generate(prompt, max_denoising_steps=asked.steps, confidence_threshold=1e-9)
        bar.update()

    def traced() -> CanvasTrace:
        with observe(model, seed=0) as traces:
            untraced()
        return traces[0]

    with_trace, without = interleaved(traced, untraced, pairs=asked.pairs, device=asked.device)
    bar.close()
    time_ratio = ratio(with_trace, without)
    memory_ratio = memory_over_saved()

    trace = trace_of_full_length()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        saving = [seconds(lambda: trace.save(path)) for _ in range(21)]
        reading = [seconds(lambda: CanvasTrace.load(path)) for _ in range(21)]

    print(f"{asked.shape} on {asked.device}, {asked.steps} steps a run")
    print(f"time, traced / untraced: {time_ratio}")
    print(f"memory, growth of the peak / saved arrays: {memory_ratio:.2f}")
    print(f"a 48-step trace: saved in {statistics.median(saving):.4f} s, read in {statistics.median(reading):.4f} s")
    results.measure("traced_over_untraced", "", with_trace / without, timed=True)
    results.measure("memory_over_saved", "", [memory_ratio], timed=True)
    results.measure("save", "ms", [1e3 * s for s in saving], timed=True)
    results.measure("read", "ms", [1e3 * s for s in reading], timed=True)
    if asked.save:
        print("written:", results.save(RECORDED_RESULTS).relative_to(RECORDED_RESULTS.parent.parent))
    missed = [
        name
        for name, met in (
            ("time <= 1.05", time_ratio.median <= 1.05),
            ("memory <= 2", memory_ratio <= 2),
            ("save < 50 ms", statistics.median(saving) < 0.05),
            ("read < 50 ms", statistics.median(reading) < 0.05),
        )
        if not met
    ]
    print("targets missed: " + ", ".join(missed) if missed else "all targets met")
    return bool(missed)


def memory_over_saved() -> float:
    """How much more the peak resident size grows in a traced run, over the bytes of the finished arrays. Linux only.

    Each run has a process of its own. The logits are kept, which makes the arrays large enough (50 MB) to be seen
    beside the few MB by which two equal runs differ.
    """
    run = """
import re, sys, torch
from pathlib import Path
from dglab_utils.models import build
from dglab_utils.sampling.observe import observe
model, prompt, nbytes = build("toy-1m"), torch.arange(2, 18)[None], 0
model.generate(prompt)  # what a first run allocates for good
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here
before = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
if sys.argv[1] == "traced":
    with observe(model, keep_logits=True) as traces:
        model.generate(prompt)
    nbytes = traces[0].nbytes
else:
    model.generate(prompt)
after = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(1024 * (after - before), nbytes)
"""

    def peak(kind: str) -> tuple[int, int]:
        # Blocks from 64 KiB are given back when freed: without that glibc keeps them, and the peak tells of its habits.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-c", run, kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        resident, saved = done.stdout.split()[-2:]
        return int(resident), int(saved)

    traced, untraced = ([peak(kind) for _ in range(3)] for kind in ("traced", "untraced"))
    growth = statistics.median(r for r, _ in traced) - statistics.median(r for r, _ in untraced)
    return growth / traced[0][1]


def trace_of_full_length() -> CanvasTrace:
    """48 steps of 256 positions, from the untrained toy that never stops."""
    model = build("toy-1m")
    with observe(model, seed=0) as traces:
        model.generate(torch.randint(2, 900, (1, 16)), max_denoising_steps=48)
    return traces[0]


if __name__ == "__main__":
    sys.exit(main())
