"""What it takes to find where a batch begins to differ.

    python benchmarks/divergence.py            # the targets: 10 s, and 3 times the memory of the batch itself
    python benchmarks/divergence.py --save     # also writes data/results/<host>/bench_divergence.json

Two denoising steps of the 17M toy, one row against four copies. Memory is what PyTorch allocates at most above what is
there before: by the comparison, over that by generating for the batch and nothing else.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from dglab_utils.measure.invariance import capped, drawn_prompts, first_divergence
from dglab_utils.measure.timing import in_turns, peak_memory
from dglab_utils.models import load
from dglab_utils.paths import RECORDED_RESULTS
from dglab_utils.report.results import Results

SECONDS, TIMES_MEMORY = 10.0, 3.0  # targets, on two cores


def main() -> int:
    """Measures, prints, and returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy-17m", help="(default: toy-17m)")
    parser.add_argument("--copies", type=int, default=4, help="rows of the batch (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each (default: 5)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--save", action="store_true", help="write data/results/<host>/bench_divergence.json")
    asked = parser.parse_args()
    results = Results.begin("bench_divergence", {k: v for k, v in vars(asked).items() if k != "save"})
    model = load(asked.model, device=asked.device)
    prompt, settings = drawn_prompts(model, 1), capped(model, 2)
    batch = prompt.repeat(asked.copies, 1)

    def generate() -> None:
        model.generate(batch, **settings)

    def compare() -> None:
        first_divergence(model, prompt, steps=2, batch=asked.copies, **settings)

    works = {"generating": generate, "comparing": compare}
    memory = {name: peak_memory(work, asked.device) for name, work in works.items()}
    taken = in_turns(works, rounds=asked.rounds, warmup=1, device=asked.device)
    for name in works:
        low, middle, high = np.quantile(taken[name], [0.25, 0.5, 0.75])
        print(f"{name}: {middle:.2f} s (quartiles {low:.2f} to {high:.2f}), {memory[name] / 2**20:.0f} MiB at its peak")
        results.measure("time", "s", taken[name], timed=True, work=name)
        results.measure("peak", "MiB", [memory[name] / 2**20], timed=True, work=name)
    times = memory["comparing"] / memory["generating"]
    results.measure("peak_ratio", "", [times], timed=True)
    if asked.save:
        print("written:", results.save(RECORDED_RESULTS).relative_to(RECORDED_RESULTS.parent.parent))
    met = np.median(taken["comparing"]) <= SECONDS and times <= TIMES_MEMORY
    targets = f"{SECONDS:g} s, {TIMES_MEMORY:g} times the memory of the batch"
    print(f"memory: {times:.2f} times the batch's;", "all targets met" if met else f"targets missed: {targets}")
    return not met


if __name__ == "__main__":
    sys.exit(main())
