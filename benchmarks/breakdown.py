"""Whether the components of a step sum to the step.

    python benchmarks/breakdown.py             # the target: within 5 % of the same step without stamps
    python benchmarks/breakdown.py --save      # also writes data/results/<host>/bench_breakdown.json

The step with stamps and the one without run in turns (`measure.breakdown`); a step of both ways of decoding, at both
ends of the batches. The target is met where the median of the pairwise ratios lies within it.
"""

from __future__ import annotations

import argparse
import sys

import torch
from tqdm.auto import tqdm

from dglab_utils.measure.breakdown import breakdown
from dglab_utils.models import build
from dglab_utils.models.decoding import CanvasStepper, TokenStepper
from dglab_utils.paths import RECORDED_RESULTS
from dglab_utils.report.results import Results

TARGET = 0.05


def main() -> int:
    """Measures, prints, and returns 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="toy-17m", help="a named toy (default: toy-17m)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="rows (default: 1 4)")
    parser.add_argument("--rounds", type=int, default=15, help="pairs; ten times as many of a token (default: 15)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--save", action="store_true", help="write data/results/<host>/bench_breakdown.json")
    asked = parser.parse_args()
    results = Results.begin("bench_breakdown", {k: v for k, v in vars(asked).items() if k != "save"})

    model = build(asked.shape, device=asked.device)
    missed = []
    for way, rows in tqdm([(way, rows) for way in ("canvas", "token") for rows in asked.batches]):
        drawn = torch.randint(2, 1000, (rows, 64), generator=torch.Generator().manual_seed(0)).to(asked.device)
        stepper = CanvasStepper(model, drawn) if way == "canvas" else TokenStepper(model, drawn)
        stepper.step()
        stepper.mark()
        rounds = asked.rounds if way == "canvas" else 10 * asked.rounds
        split = breakdown(model, stepper.step, before=stepper.rewind, rounds=rounds, device=asked.device)
        summed = split.summed
        tqdm.write(f"{way} step, batch {rows}: parts over whole {summed}")
        on = {"way": way, "batch": rows, "interval": [summed.low, summed.high]}
        results.measure("parts_over_whole", "", sum(split.parts.values()) / split.whole, timed=True, **on)
        if abs(summed.median - 1) > TARGET:
            missed.append(f"{way} step, batch {rows}")
    if asked.save:
        print("written:", results.save(RECORDED_RESULTS).relative_to(RECORDED_RESULTS.parent.parent))
    print(f"further off than {TARGET:.0%}: " + ", ".join(missed) if missed else "all targets met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
