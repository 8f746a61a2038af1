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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
Check = Callable[[Any], bool]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a host's folder or an experiment's file


def _is(*kinds: type) -> Check:
    """Whether a value that came from JSON is of one of these types; True is no number."""
    return lambda value: type(value) in kinds


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # false for NaN


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


# What a file holds.
FIELDS: dict[str, Check] = {
    "experiment": _is(str),
    "host": _is(str),
    "parameters": _is(dict),
    "environment": _is(dict),
    "started": _is(str),
    "seconds": _is_finite,
    "measurements": _is(list),
    "digests": lambda value: type(value) is dict and all(map(_is(str), value.values())),
    "verdict_inputs": _is(dict),
}
MEASUREMENT_FIELDS: dict[str, Check] = {
    "name": _is(str),
    "unit": _is(str),
    **dict.fromkeys(("median", "q1", "q3"), _is_finite),
    "count": _is_count,
    "labels": _is(dict),
    "timed": _is(bool),
}


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

        Raises:
            LabError: the host or the experiment is no name of a file.
        """
        for name in (self.host, self.experiment):
            if not _NAME.fullmatch(name):
                raise LabError(f"results: {name!r} cannot name a file; letters, digits, - . and _ can")
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
    except (OSError, ValueError, RecursionError) as error:  # not there to read, not UTF-8, not JSON, nested too deep
        raise LabError(f"{path}: not a results file ({error}); delete it and run the experiment again") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise LabError(f"{path}: field schema is {found!r}, this version reads {SCHEMA}; run the experiment again")
    del content["schema"]
    if fault := next(_faults(content), None):
        raise LabError(f"{path}: {fault}; run the experiment again")
    content["measurements"] = [Measurement(**m) for m in content["measurements"]]
    return Results(**content)


def _faults(content: Mapping[str, Any]) -> Iterator[str]:
    """What differs from what `save` writes, one line each; later lines rely on the earlier ones being none."""
    yield from _misfits(content, FIELDS, "")
    for name in ("experiment", "host"):
        if not _NAME.fullmatch(content[name]):
            yield f"field {name} is {content[name]!r}, which cannot name a file; letters, digits, - . and _ can"
    yield from _misfits(content["environment"], {"hardware": _is(dict), "versions": _is(dict)}, "environment.", True)
    if not _is(str)(content["environment"]["versions"].get("transformers")):
        yield "field environment.versions.transformers is missing or of the wrong type"
    for number, measurement in enumerate(content["measurements"]):
        if not isinstance(measurement, dict):
            yield f"field measurements[{number}] is of the wrong type"
        yield from _misfits(measurement, MEASUREMENT_FIELDS, f"measurements[{number}].")
    for name, value in content.items():
        try:
            json.dumps(value, allow_nan=False)  # Python's reader takes NaN and 1e999, which are no JSON numbers
        except ValueError:
            yield f"field {name} holds a number that is not finite"


def _misfits(
    content: Mapping[str, Any], fields: Mapping[str, Check], where: str, others: bool = False
) -> Iterator[str]:
    """A line for each field that is missing, of the wrong type, or (unless `others` may be there) unknown."""
    for name, fits in fields.items():
        if name not in content or not fits(content[name]):
            yield f"field {where}{name} is missing or of the wrong type"
    if not others and (unknown := content.keys() - fields.keys()):
        yield f"unknown field {where}{sorted(unknown)[0]}"


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
    """What the machine is, for the device that was used: `host` slug, CPU, cores, memory, GPU and its driver.

    Raises:
        LabError: the device is a CUDA one and there is none.
    """
    cpu = _cpu_name()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, Any] = {"cpu": cpu, "cores": cores, "memory_gib": round(memory / 2**30, 1)}
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise LabError(f"device = {device!r}, but PyTorch finds no CUDA device on this machine; use cpu")
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
    # Recording the results of one notebook must not make the next one's checkout look edited.
    code = (".", ":(exclude)data/results")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", *code)
    return {"commit": commit or "unknown", "dirty": bool(changed)}


def _output(*command: str) -> str:
    """What a command prints; "" when it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
