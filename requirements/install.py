"""Makes a virtual environment that holds what a lock file says; does nothing when it is there already.

    python requirements/install.py .venv requirements.lock

It runs before anything is installed: standard library only, and no syntax that an old Python cannot read before
it is told that it is too old. It knows nothing of what the packages are for.

Inside the environment lies a stamp: for which checkout, which Python, which locked versions and which torch it
was made. Set-up writes "unfinished" there first and the stamp last, so an interrupted set-up never looks like a
finished one. What the next call does follows from the stamp alone (`decide`).
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

if not (3, 11) <= sys.version_info < (3, 14):
    sys.exit(
        f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}; this needs 3.11, 3.12 or 3.13. "
        "Name one: make PYTHON=/path/to/python3.12 ..."
    )

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".dglab-setup.json"
UNFINISHED = "unfinished"


def read_stamp(venv: Path) -> dict[str, str] | str | None:
    """The stamp of a finished set-up, `UNFINISHED` of an interrupted one, None of an environment without either."""
    try:
        text = (venv / STAMP).read_text()
    except OSError:
        return None
    try:
        return json.loads(text) if text != UNFINISHED else UNFINISHED
    except ValueError:
        return UNFINISHED


def python_of(venv: Path) -> str | None:
    """Version and home of the environment's Python; None when it does not run (removed, upgraded, moved)."""
    probe = "import sys; print(sys.version.split()[0], sys.base_prefix)"
    try:
        return subprocess.run(
            [str(venv / "bin" / "python"), "-c", probe], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def digest(*files: Path) -> str:
    """SHA-256 over the contents of the files."""
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()


def decide(
    stamp: dict[str, str] | str | None,
    python: str | None,
    wanted: dict[str, str],
    any_python: bool,
) -> tuple[str, str]:
    """What to do with the environment, and why.

    Args:
        stamp: what `read_stamp` found.
        python: what `python_of` found.
        wanted: the stamp that a set-up would write now; `torch_index` is empty where the caller named none.
        any_python: the caller named no Python, so a working environment of another one is kept.

    Returns:
        ("keep" | "update" | "rebuild", reason). An update installs into what is there.
    """
    if python is None:
        return "rebuild", "there is no working Python in it"
    if stamp == UNFINISHED:
        return "rebuild", "its set-up was interrupted"
    if not any_python and python != wanted["python"]:
        return "rebuild", f"it holds Python {python}, wanted is {wanted['python']}"
    if not isinstance(stamp, dict):
        # Which torch it holds is unknown, so a named index wants a new one.
        return ("rebuild" if wanted["torch_index"] else "update"), "it was not made by this command"
    if stamp.get("root") != wanted["root"]:
        return "rebuild", f"it was made for {stamp.get('root')}"
    if stamp.get("python") != python:
        return "rebuild", f"it was made for Python {stamp.get('python')} and now holds {python}"
    if wanted["torch_index"] and stamp.get("torch_index") != wanted["torch_index"]:
        return "rebuild", f"torch is now wanted from {wanted['torch_index']}"
    if stamp.get("requirements") != wanted["requirements"]:
        return "update", "the locked versions changed"
    return "keep", ""


def locked_version(lock: Path, package: str) -> str:
    """The `package==version` line of a lock file, without marker and comment."""
    for line in lock.read_text().splitlines():
        if line.startswith(package + "=="):
            return line.split("#")[0].split(";")[0].strip()
    sys.exit(f"{lock}: {package} is not locked; run `make lock`")


def install(venv: Path, lock: Path, torch_index: str) -> None:
    """Installs torch from its index if one is named, then everything locked, then this checkout (editable)."""
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    if torch_index:
        # A build such as 2.13.0+cpu satisfies the lock's 2.13.0, so the second call leaves it alone.
        subprocess.run([*pip, locked_version(lock, "torch"), "--index-url", torch_index], check=True)
    subprocess.run([*pip, "-r", str(lock)], check=True)
    # setuptools is in the lock, so the build needs nothing that is not locked.
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def main() -> None:
    """Reads the command line and brings the environment to what the lock says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--torch-index", default="", help="index that torch is installed from first")
    parser.add_argument("--any-python", action="store_true", help="keep a working environment of another Python")
    asked = parser.parse_args()

    venv, lock = ROOT / asked.venv, ROOT / asked.lock
    here = f"{sys.version.split()[0]} {sys.base_prefix}"
    stamp, python = read_stamp(venv), python_of(venv)
    wanted = {
        "root": str(ROOT),
        "python": here,
        "requirements": digest(lock, ROOT / "pyproject.toml"),
        "torch_index": asked.torch_index,
    }
    action, reason = decide(stamp, python, wanted, asked.any_python)
    if action == "keep":
        return

    if action == "rebuild":
        try:
            import ensurepip  # noqa: F401  Debian ships it apart from python3, in python3-venv
            import venv as _  # noqa: F401
        except ImportError:
            sys.exit(f"{sys.executable} has no venv module; on Debian and Ubuntu: apt install python3-venv")
        if venv.exists():
            print(f"{asked.venv}: made anew, {reason}", flush=True)
            shutil.rmtree(venv)
    else:
        print(f"{asked.venv}: updated, {reason}", flush=True)
        wanted["python"] = python or here
        if isinstance(stamp, dict) and not asked.torch_index:
            wanted["torch_index"] = stamp.get("torch_index", "")

    print(f"{asked.venv}: installing what {asked.lock} says (once; a few minutes, mostly torch)", flush=True)
    try:
        venv.mkdir(parents=True, exist_ok=True)
        (venv / STAMP).write_text(UNFINISHED)
        if action == "rebuild":
            # The base executable, because the one that runs this may have lain in the environment just removed.
            subprocess.run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(venv)], check=True)
        install(venv, lock, wanted["torch_index"])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{asked.venv}: set-up stopped at `{' '.join(error.cmd[1:4])} ...`; see above, then call make again")
    temporary = venv / (STAMP + ".new")
    temporary.write_text(json.dumps(wanted, indent=1))
    os.replace(temporary, venv / STAMP)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
