"""What a profile's notebooks take: seconds, and the peak memory of the largest process.

    python benchmarks/profiles.py 03_speed_model 04_size_and_batch
    python benchmarks/profiles.py --profile full --limit-s 2400 03_speed_model 04_size_and_batch --save

The targets of the quick profile: both notebooks within 4 minutes and 6 GB on two cores.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time

from dglab_utils.paths import RECORDED_RESULTS
from dglab_utils.report.results import Results


def main() -> int:
    """Runs, prints, and returns 1 when a target is missed or a notebook failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", help="notebooks")
    parser.add_argument("--profile", default="quick", help="a profile of notebooks/profiles (default: quick)")
    parser.add_argument("--limit-s", type=float, default=240, help="seconds, all of them (default: 240)")
    parser.add_argument("--limit-gb", type=float, default=6, help="1e9 bytes, any process (default: 6)")
    parser.add_argument("--save", action="store_true", help="write data/results/<host>/bench_profile_<profile>.json")
    asked = parser.parse_args()
    results = Results.begin(f"bench_profile_{asked.profile}", {k: v for k, v in vars(asked).items() if k != "save"})

    seconds, failed = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.names:
            command = [sys.executable, "-m", "dglab_utils.runs", "run", name, "--profile", asked.profile]
            began = time.perf_counter()
            status = subprocess.run([*command, "--runs", scratch, "-p", f"results_dir={scratch}"]).returncode
            seconds.append(time.perf_counter() - began)
            results.measure("run", "s", [seconds[-1]], timed=True, notebook=name)
            if status:
                failed.append(f"{name} (exit status {status})")
    # Of all processes that were waited for, kernels among them: kernels are what grows.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
    results.measure("peak_memory", "GB", [peak], timed=True)
    print(", ".join(f"{name} {s:.0f} s" for name, s in zip(asked.names, seconds, strict=True)), f"; peak {peak:.2f} GB")
    if asked.save:
        print("written:", results.save(RECORDED_RESULTS).relative_to(RECORDED_RESULTS.parent.parent))
    targets = (
        (f"{asked.limit_s:g} s", sum(seconds) <= asked.limit_s),
        (f"{asked.limit_gb:g} GB", peak <= asked.limit_gb),
    )
    missed = failed + [target for target, met in targets if not met]
    print("missed: " + ", ".join(missed) if missed else "all targets met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
