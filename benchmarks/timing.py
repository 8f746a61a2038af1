"""What timing costs, and whether it agrees with itself.

    python benchmarks/timing.py             # the targets: < 1 % added to a 10 ms step, two runs of a ratio agree
    python benchmarks/timing.py --save      # also writes data/results/<host>/bench_timing.json

The step is a wait of exactly 10 ms on the thread's CPU clock, which stands still while the machine runs something else:
what passes on it from one step to the next, beyond 10 ms, was added by the timing code. `torch.utils.benchmark` is put
through the same for comparison. Two runs of one ratio agree when each one's median lies in the other's interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
from torch.utils.benchmark import Timer

from dglab_utils.measure.speed import step_costs
from dglab_utils.measure.timing import Run, in_turns, ratio
from dglab_utils.models import build
from dglab_utils.paths import RECORDED_RESULTS
from dglab_utils.report.results import Results

STEP = 0.010  # s


def main() -> int:
    """Measures, prints, and returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="waits of 10 ms (default: 200)")
    parser.add_argument("--shape", default="toy-1m", help="the model of the ratio (default: toy-1m)")
    parser.add_argument("--pairs", type=int, default=31, help="pairs of each of the two runs (default: 31)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--save", action="store_true", help="write data/results/<host>/bench_timing.json")
    asked = parser.parse_args()
    results = Results.begin("bench_timing", {k: v for k, v in vars(asked).items() if k != "save"})

    ours = added(lambda step: in_turns({"step": step}, rounds=asked.steps, warmup=2, device=asked.device))
    theirs = added(lambda step: Timer("step()", globals={"step": step}).timeit(asked.steps))
    print(f"added to a 10 ms step: {np.median(ours):.4%} (torch.utils.benchmark: {np.median(theirs):.4%})")

    model = build(asked.shape, device=asked.device)
    costs = [step_costs(model, rounds=asked.pairs) for _ in range(2)]
    first, second = (ratio(c["canvas step"], c["token step"]) for c in costs)
    print(f"canvas step / token step of {asked.shape}, twice:\n  {first}\n  {second}")

    results.measure("added", "", ours, timed=True)
    for run, (cost, found) in enumerate(zip(costs, (first, second), strict=True)):
        interval = [found.low, found.high]
        pairwise = cost["canvas step"] / cost["token step"]
        results.measure("cost_ratio", "", pairwise, timed=True, run=run, interval=interval)
    if asked.save:
        print("written:", results.save(RECORDED_RESULTS).relative_to(RECORDED_RESULTS.parent.parent))
    missed = [
        name
        for name, met in (
            ("added < 1 %", np.median(ours) < 0.01),
            ("two runs agree", first.low <= second.median <= first.high and second.low <= first.median <= second.high),
        )
        if not met
    ]
    print("targets missed: " + ", ".join(missed) if missed else "all targets met")
    return bool(missed)


def added(time_it: Callable[[Run], object]) -> np.ndarray:
    """Fractions of 10 ms by which consecutive steps lie further apart than they take, when `time_it` times them."""
    began: list[float] = []

    def step() -> None:
        began.append(time.thread_time())
        until = began[-1] + STEP
        while time.thread_time() < until:
            pass

    time_it(step)
    return np.diff(began) / STEP - 1


if __name__ == "__main__":
    sys.exit(main())
