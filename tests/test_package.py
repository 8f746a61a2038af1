"""The checkout as a package: locked versions, what set-up decides, where imports may point, what is cheap to import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dglab_utils import __version__
from dglab_utils.paths import NOTEBOOKS, ROOT
from dglab_utils.runs.catalogue import notebooks_in

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = Path(sysconfig.get_path("scripts"))
PYTHONS = ["3.11", "3.12", "3.13"]


def requirements(name: str) -> list[Requirement]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


def locked(name: str = "requirements.lock", python: str | None = None) -> dict[str, Requirement]:
    """Package to its pin; those that this machine with this or the named Python would install."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"} if python else {}
    return {canonicalize_name(r.name): r for r in requirements(name) if not r.marker or r.marker.evaluate(environment)}


# -- the lock ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["requirements.lock", *(f.name for f in ROOT.glob("requirements/*.lock"))])
def test_a_lock_pins_everything_and_names_no_place(name: str):
    path = ROOT / name if (ROOT / name).exists() else ROOT / "requirements" / name
    text = path.read_text()
    assert not re.search(r"://|^-|--hash", text, re.M), "packages come from wherever pip is set up to look"
    for requirement in requirements(str(path.relative_to(ROOT))):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), f"{requirement}: not one exact version"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_meets_every_direct_need(python: str):
    pins = locked(python=python)
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        need = Requirement(text)
        pin = pins[canonicalize_name(need.name)]
        (version,) = pin.specifier
        assert need.specifier.contains(version.version), f"{pin} does not meet {need}; run `make lock`"


def test_a_cpu_build_of_torch_needs_nothing_more():
    assert not [name for name in locked() if name.startswith(("nvidia", "cuda", "triton"))]


def test_this_environment_is_the_locked_one():
    wrong = []
    for name, pin in locked().items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version == "missing" or not pin.specifier.contains(version):
            wrong.append(f"{pin}: {version}")
    assert not wrong, "call `make setup`"


def test_installed_packages_agree_with_each_other():
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert check.returncode == 0, check.stdout


def test_conda_installs_the_same_set():
    python, pip, install = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"])
    assert pip == "pip"
    # `-e .` adds nothing to the lock, which meets every need of pyproject.toml (above).
    assert install == {"pip": ["-r requirements.lock", "-e ."]}


def test_compat_goes_from_the_oldest_supported_release_to_before_the_pin():
    makefile = (ROOT / "Makefile").read_text()
    releases = re.search(r"^COMPAT := (.+)$", makefile, re.M)[1].split()
    assert all(not locked()["transformers"].specifier.contains(release) for release in releases)
    oldest = Requirement(next(d for d in PROJECT["dependencies"] if d.startswith("transformers")))
    assert f">={releases[0].removesuffix('.0')}" in str(oldest.specifier).split(",")
    for release in releases:
        compat = locked(f"requirements/compat-{release}.lock")
        assert str(compat["transformers"].specifier) == f"=={release}"
        for shared in ("torch", "numpy", "scipy", "pytest"):
            assert compat[shared].specifier == locked()[shared].specifier


# -- set-up --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_set_up_asks_for_the_pythons_that_the_package_supports(setup: ModuleType):
    supported = SpecifierSet(PROJECT["requires-python"])
    assert [v for v in ("3.10", "3.11", "3.12", "3.13", "3.14") if supported.contains(v)] == PYTHONS
    source = (ROOT / "requirements" / "install.py").read_text()
    assert "(3, 11) <= sys.version_info < (3, 14)" in source
    assert "(3, 11) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text()


HERE = {"root": "/a/checkout", "python": "3.11.7 /usr", "requirements": "abc", "torch_index": ""}
CPU, CUDA = "https://wheels.example/cpu", "https://wheels.example/cuda"


@pytest.mark.parametrize(
    ("action", "stamp", "python", "wanted", "any_python"),
    [
        ("keep", HERE, "3.11.7 /usr", HERE, False),
        ("keep", HERE | {"torch_index": CPU}, "3.11.7 /usr", HERE, False),
        ("keep", HERE | {"python": "3.12.1 /opt"}, "3.12.1 /opt", HERE, True),
        ("rebuild", HERE | {"python": "3.12.1 /opt"}, "3.12.1 /opt", HERE, False),
        ("rebuild", HERE, "3.11.9 /usr", HERE, True),
        ("rebuild", HERE, None, HERE, True),
        ("rebuild", None, None, HERE, True),
        ("rebuild", "unfinished", "3.11.7 /usr", HERE, True),
        ("rebuild", HERE | {"root": "/another"}, "3.11.7 /usr", HERE, True),
        ("rebuild", HERE | {"torch_index": CPU}, "3.11.7 /usr", HERE | {"torch_index": CUDA}, True),
        ("rebuild", None, "3.11.7 /usr", HERE | {"torch_index": CUDA}, True),
        ("update", HERE | {"requirements": "old"}, "3.11.7 /usr", HERE, True),
        ("update", None, "3.11.7 /usr", HERE, True),
    ],
)
def test_what_set_up_decides(setup: ModuleType, action, stamp, python, wanted, any_python):
    assert setup.decide(stamp, python, wanted, any_python)[0] == action


def test_an_interrupted_or_damaged_stamp_is_no_stamp(setup: ModuleType, tmp_path: Path):
    assert setup.read_stamp(tmp_path) is None
    stamp = tmp_path / setup.STAMP
    for content in (setup.UNFINISHED, '{"root": ', ""):
        stamp.write_text(content)
        assert setup.read_stamp(tmp_path) == setup.UNFINISHED
    stamp.write_text(json.dumps(HERE))
    assert setup.read_stamp(tmp_path) == HERE


def test_a_failed_install_leaves_no_valid_stamp(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["python", "-m", "pip", "install"])

    monkeypatch.setattr(setup, "install", fails)
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "venv"), "requirements.lock"])
    with pytest.raises(SystemExit, match="set-up stopped at"):
        setup.main()
    assert setup.read_stamp(tmp_path / "venv") == setup.UNFINISHED
    monkeypatch.setattr(setup, "install", lambda *_: None)
    setup.main()
    assert setup.read_stamp(tmp_path / "venv")["python"] == setup.python_of(tmp_path / "venv")


# -- the package ---------------------------------------------------------------------------------------------


def test_versions_agree():
    assert __version__ == PROJECT["version"] == importlib.metadata.version("dglab-utils")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_itself_is_cheap_to_import():
    code = "import sys, dglab_utils, dglab_utils.errors; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("models/__init__.py", "from dglab_utils import sampling"),
        ("sampling/trace.py", "from dglab_utils import report"),
        ("errors.py", "import dglab_utils.models"),
        ("somewhere_else.py", "import json"),
    ],
)
def test_an_import_upwards_breaks_the_contract(tmp_path: Path, module: str, line: str):
    shutil.copytree(ROOT / "dglab_utils", tmp_path / "dglab_utils", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "dglab_utils" / module).open("a") as file:
        file.write(f"\n{line}\n")
    lint = subprocess.run(
        [str(SCRIPTS / "lint-imports"), "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert lint.returncode == 1, lint.stdout + lint.stderr
    assert "Six rooms, imports run downwards BROKEN" in lint.stdout


def test_the_readme_example_runs(tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    run = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "positions accepted a step" in run.stdout
    assert (tmp_path / "build" / "canvas.npz").exists()


def test_the_readme_names_notebooks_and_parameters_that_exist():
    text = (ROOT / "README.md").read_text()
    known = {notebook.name: notebook.parameter_names for notebook in notebooks_in(NOTEBOOKS)}
    assert re.findall(r"^\| `(\d\d_\w+)` \|", text, re.M) == sorted(known)
    commands = re.findall(r"(\d\d_\w+)\S* .*?-p (\w+)[= ]", text)
    assert commands
    assert not [(name, parameter) for name, parameter in commands if parameter not in known[name]]
