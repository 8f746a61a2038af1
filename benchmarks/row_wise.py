"""What it costs to make the rows of a batch independent of each other on this machine.

    python benchmarks/row_wise.py            # the target: at most 1.3 times the plain batch of four
    python benchmarks/row_wise.py --save     # also writes data/results/<host>/bench_row_wise.json

The cheapest way that is enough for every request, in each of its placements, is looked for as `dglab check` does, to
the end of every text. Timed is the same work for all: so many denoising steps of a batch of copies, in turns.
"""

from __future__ import annotations

import argparse
import sys

from dglab_utils.measure.invariance import capped, drawn_prompts
from dglab_utils.measure.invariance_fix import ONE_BY_ONE, Setting, confirmed, cost, minimal_fix
from dglab_utils.measure.timing import ratio
from dglab_utils.models import load
from dglab_utils.paths import RECORDED_RESULTS
from dglab_utils.report.results import Results

TIMES = 1.3  # target, at four rows in float32


def main() -> int:
    """Measures, prints, and returns 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="(default: nano)")
    parser.add_argument("--rows", type=int, default=4, help="of the batch (default: 4)")
    parser.add_argument("--prompts", type=int, default=12, help="requests to be enough for (default: 12)")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps that are timed (default: 8)")
    parser.add_argument("--rounds", type=int, default=31, help="timings of each way (default: 31)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", help="(default: float32)")
    parser.add_argument("--save", action="store_true", help="write data/results/<host>/bench_row_wise.json")
    asked = parser.parse_args()
    results = Results.begin("bench_row_wise", {k: v for k, v in vars(asked).items() if k != "save"})
    model = load(asked.model, device=asked.device, dtype=asked.dtype)
    prompts = drawn_prompts(model, asked.prompts)
    fix = minimal_fix(model, prompts[:1], batch=asked.rows)
    if fix.tried.get(Setting()):
        print(f"{asked.model} in {asked.dtype}: the first request does not differ here, so there is nothing to undo")
        return 0
    helps = confirmed(model, fix, prompts, batch=asked.rows)
    if helps is None:
        sys.exit(f"{asked.model} in {asked.dtype}: nothing that was tried makes its rows independent here")
    few = capped(model, asked.steps)
    taken = cost(model, [helps], prompts[:1], batch=asked.rows, rounds=asked.rounds, **few)
    plain = taken[str(Setting())]
    for way, seconds in taken.items():
        print(f"{way}: {ratio(seconds, plain)} times the plain batch")
        results.measure("time", "s", seconds, timed=True, way=way, chosen=way == str(helps), one=way == ONE_BY_ONE)
    if asked.save:
        print("written:", results.save(RECORDED_RESULTS).relative_to(RECORDED_RESULTS.parent.parent))
    met = ratio(taken[str(helps)], plain).median <= TIMES
    print("all targets met" if met else f"targets missed: {TIMES:g} times the plain batch")
    return not met


if __name__ == "__main__":
    sys.exit(main())
