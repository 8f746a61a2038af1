"""Results on disk: what one run of one experiment found, and on what.

    results = Results.begin("02_commit_waves", parameters)
    results.measure("steps", "steps", [31], growth=0.5)
    results.save(folder)                    # folder/<host>/02_commit_waves.json

A run writes below `build/results` unless its notebook's `results_dir` names another folder; the results that are kept
with the project lie in `data/results`. Both have one folder a host. Readers get this machine's fresh run first, then
every recorded host.

Two parts of a file differ in kind. The deterministic one (parameters, digests, verdict inputs, measurements that are
no durations) is equal, byte for byte, for equal parameters, seeds and library versions; `deterministic()` gives it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dglab_utils.errors import LabError
from dglab_utils.measure.records import Measurement
from dglab_utils.paths import FRESH_RESULTS, RECORDED_RESULTS, ROOT, written

SCHEMA = 1
LIBRARIES = ("torch", "transformers", "numpy", "dglab-utils")


@dataclass
class Results:
    """One run of one experiment.

    Attributes:
        experiment: the notebook's name.
        host: slug of the machine, such as `cpu-xeon-2c` or `nvidia-h200`.
        parameters: as run.
        environment: hardware, versions of the libraries, commit of the checkout, whether it was dirty.
        started: UTC, ISO 8601. seconds: duration.
        measurements: figures with their spread.
        digests: name to SHA-256 of a deterministic array.
        verdict_inputs: name to plain value; what the claims' verdicts are computed from.
    """

    experiment: str
    host: str
    parameters: dict[str, Any]
    environment: dict[str, Any]
    started: str
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    verdict_inputs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began: float | None = None

    @classmethod
    def begin(cls, experiment: str, parameters: Mapping[str, Any]) -> Results:
        """An empty record of a run that starts now, on this machine."""
        device = str(parameters.get("device", "cpu"))
        hardware = hardware_of(device)
        results = cls(
            experiment=experiment,
            host=hardware["host"],
            parameters=dict(parameters),
            environment={"hardware": hardware, "versions": _versions(), **_checkout()},
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        results._began = time.perf_counter()
        return results

    def measure(self, name: str, unit: str, samples: Sequence[float], *, timed: bool = False, **labels: Any) -> None:
        """Adds the measurement of these samples."""
        self.measurements.append(Measurement.of(name, unit, samples, timed=timed, **labels))

    def find(self, name: str, **labels: Any) -> Measurement:
        """The one measurement of this name whose labels include these.

        Raises:
            LabError: none, or several.
        """
        found = [m for m in self.measurements if m.name == name and labels.items() <= m.labels.items()]
        if len(found) != 1:
            there = sorted({m.name for m in self.measurements})
            raise LabError(
                f"{self.experiment} on {self.host}: {len(found)} measurements called {name!r} with {labels}, want one; "
                f"names there: {', '.join(there)}"
            )
        return found[0]

    def verdict_input(self, name: str) -> Any:
        """The verdict input of this name. Raises LabError when the run has none."""
        if name not in self.verdict_inputs:
            raise LabError(
                f"{self.experiment} on {self.host}: this run has no {name}; run it with the default parameters"
            )
        return self.verdict_inputs[name]

    def deterministic(self) -> bytes:
        """The part that a rerun must reproduce byte for byte."""
        part = {
            "experiment": self.experiment,
            "parameters": self.parameters,
            "measurements": [asdict(m) for m in self.measurements if not m.timed],
            "digests": self.digests,
            "verdict_inputs": self.verdict_inputs,
        }
        return json.dumps(part, sort_keys=True, allow_nan=False).encode()

    def save(self, folder: str | Path = "") -> Path:
        """Writes `folder/<host>/<experiment>.json`.

        Args:
            folder: "" is the git-ignored folder of fresh results; a relative one is taken from the checkout's root,
                wherever the notebook's kernel happens to run.
        """
        if self._began is not None:
            self.seconds = round(time.perf_counter() - self._began, 3)
        base = ROOT / Path(folder).expanduser() if str(folder) else FRESH_RESULTS
        path = base / self.host / f"{self.experiment}.json"
        with written(path) as temporary:
            text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        return path


def read(path: str | Path) -> Results:
    """Reads a results file.

    Raises:
        LabError: names the file and, where one is wrong, the field.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"{path}: no such results file; run the experiment first") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LabError(f"{path}: not a results file ({error}); delete it and run the experiment again") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise LabError(f"{path}: field schema is {found!r}, this version reads {SCHEMA}; run the experiment again")
    del content["schema"]
    expected: dict[str, type | tuple[type, ...]] = {
        "experiment": str,
        "host": str,
        "parameters": dict,
        "environment": dict,
        "started": str,
        "seconds": (int, float),
        "measurements": list,
        "digests": dict,
        "verdict_inputs": dict,
    }
    for name, kind in expected.items():
        if not isinstance(content.get(name), kind):
            raise LabError(f"{path}: field {name} is missing or of the wrong type; run the experiment again")
    if unknown := content.keys() - expected.keys():
        raise LabError(f"{path}: unknown field {sorted(unknown)[0]}; run the experiment again")
    try:
        content["measurements"] = [Measurement(**m) for m in content["measurements"]]
    except TypeError as error:
        raise LabError(f"{path}: field measurements: {error}; run the experiment again") from None
    return Results(**content)


def everywhere(experiment: str, fresh: Path | None = None, recorded: Path = RECORDED_RESULTS) -> list[Results]:
    """All results of an experiment: this machine's fresh run first, then the recorded hosts in order of name.

    Args:
        fresh: folder of fresh runs, `build/results` when None.
        recorded: folder of the results kept with the project.
    """
    found = []
    for folder in (FRESH_RESULTS if fresh is None else fresh, recorded):
        found += [read(path) for path in sorted(folder.glob(f"*/{experiment}.json"))]
    return found


def quoted(experiment: str, name: str, **labels: Any) -> tuple[Measurement, Results]:
    """The measurement that prose quotes, and the run it is from: the first of `everywhere` that has it.

    A fresh run with other parameters may lack what the prose speaks of; the recorded runs have it then.

    Raises:
        LabError: the experiment has no results yet, or none with this measurement.
    """
    runs = everywhere(experiment)
    if not runs:
        raise LabError(f"{experiment}: no results yet; run it with `dglab run {experiment}`")
    refusals = []
    for run in runs:
        try:
            return run.find(name, **labels), run
        except LabError as error:
            refusals.append(error)
    raise refusals[0]


# -- this machine --------------------------------------------------------------------------------------------


def hardware_of(device: str = "cpu") -> dict[str, Any]:
    """What the machine is, for the device that was used: `host` slug, CPU, cores, memory, GPU and its driver."""
    cpu = _cpu_name()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, Any] = {"cpu": cpu, "cores": cores, "memory_gib": round(memory / 2**30, 1)}
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        return {"host": slug(properties.name), **found}
    return {"host": f"cpu-{slug(cpu)}-{cores}c", **found}


def slug(name: str) -> str:
    """A hardware name as a short slug: trade marks, clock rates and filler words removed."""
    words = re.sub(r"\((r|tm|c)\)|@.*$|\b(cpu|processor|core|\d+-core|gpu|intel|amd)\b", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9]+", words)) or "unknown"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return versions


def _checkout() -> dict[str, Any]:
    """Commit of this checkout and whether tracked files differ from it; `unknown` outside one."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit or "unknown", "dirty": bool(changed)}


def _output(*command: str) -> str:
    """What a command prints; "" when it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
