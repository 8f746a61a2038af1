"""The `dglab` command: list, run, book, lab, train-nano, test-nano, check. `__main__.py` starts it and answers Ctrl-C.

Exit status: 0 done, 1 a notebook failed, the book was refused or a check found a difference, 2 bad input (nothing was
run), 130 on Ctrl-C.
Everything slow (papermill, Sphinx) is imported by the command that needs it, after its arguments were checked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dglab_utils import __version__
from dglab_utils.errors import LabError
from dglab_utils.paths import BUILD, NOTEBOOKS, written
from dglab_utils.runs import EXIT_INTERRUPTED
from dglab_utils.runs.catalogue import notebooks_in, overrides, plans, profile_path, read_profile, select

RUNS = BUILD / "runs"
CELL_TIMEOUT = 3600  # s; the longest measurement on a slow machine stays below


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command is open_lab:
        options.jupyter = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return options.command(options)
    except LabError as error:
        for line in str(error).splitlines():
            print(f"dglab: {line}", file=sys.stderr)
        return error.exit_status


def list_notebooks(options: argparse.Namespace) -> int:
    """`dglab list`: notebooks, their questions and parameters, and the profiles."""
    notebooks = select(options.names, notebooks_in(options.notebooks))
    for notebook in notebooks:
        print(f"{notebook.name}\n    {notebook.question}")
        left = [f"{p.name}: {p.annotation} = {p.default!r}" for p in notebook.parameters]
        width = max(map(len, left), default=0)
        for text, parameter in zip(left, notebook.parameters, strict=True):
            print(
                f"      {text:<{width}}  {parameter.comment}" + (f" [{parameter.allowed}]" if parameter.allowed else "")
            )
    profiles = sorted(path.stem for path in (options.notebooks / "profiles").glob("*.yaml"))
    print(f"\nprofiles: {', '.join(profiles) or 'none'}")
    return 0


def run_notebooks(options: argparse.Namespace) -> int:
    """`dglab run`: checks every value of every selected notebook, then runs them."""
    catalogue = notebooks_in(options.notebooks)
    selected = select(options.names, catalogue)
    profile = profile_path(options.profile, options.notebooks / "profiles")
    planned = plans(selected, read_profile(profile, catalogue), overrides(options.parameters, selected))

    folder = options.runs / profile.stem
    _refuse_unwritable(folder)

    from dglab_utils.runs.execute import INTERRUPTED, OK, run_all, summary

    records = run_all(planned, profile.stem, folder, options.cell_timeout)
    print(summary(records, folder))
    if any(record.status == INTERRUPTED for record in records):
        return EXIT_INTERRUPTED
    return 0 if all(record.status == OK for record in records) else 1


def _refuse_unwritable(folder: Path) -> None:
    """Makes the folder of the runs, and tries to write there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LabError(f"{folder}: no run can be kept there ({error.strerror}); give --runs another folder") from None


def make_book(options: argparse.Namespace) -> int:
    """`dglab book`: publishes a profile's saved runs."""
    profile = profile_path(options.profile, options.notebooks / "profiles")
    if options.run and (status := run_notebooks(options)):
        return status
    from dglab_utils.runs.book import build_book

    page = build_book(options.runs / profile.stem)
    print(f"The book is built. Open it in a browser:\n  {os.path.relpath(page)}\n  {page.as_uri()}")
    return 0


def _lab_settings() -> Path:
    """JupyterLab settings for playing with committed notebooks: nothing is saved unless the user says so."""
    plugin = BUILD / "lab-settings" / "@jupyterlab" / "docmanager-extension" / "plugin.jupyterlab-settings"
    with written(plugin) as temporary:
        temporary.write_text('{"autosave": false}\n', encoding="utf-8")
    return BUILD / "lab-settings"


def open_lab(options: argparse.Namespace) -> int:
    """`dglab lab`: JupyterLab, bound to the loopback interface."""
    # Kernelspecs of this environment before those a user has installed elsewhere.
    environment = {"JUPYTERLAB_SETTINGS_DIR": str(_lab_settings()), **os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={options.notebooks}",
    ]
    return subprocess.run([*command, *options.jupyter], env=environment).returncode


def train_nano(options: argparse.Namespace) -> int:
    """`dglab train-nano`: trains, or goes on training, in a folder."""
    from dglab_utils.models.nano_training import DEMONSTRATION, Recipe
    from dglab_utils.runs import nano

    recipe = DEMONSTRATION if options.demo else Recipe()
    names = ("steps", "rows", "learning_rate", "objective", "precision", "seed", "threads")
    asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    nano.train_nano(options.folder, replace(recipe, **asked), options.device)
    return 0


def test_nano(options: argparse.Namespace) -> int:
    """`dglab test-nano`: held-out accuracy of a checkpoint, as a table."""
    from dglab_utils.runs import nano

    asked = {"a_level": options.a_level, "seed": options.seed, "tasks": options.task}
    nano.test_and_tell(options.model, with_card=options.card, **asked)
    return 0


# Options of `check` that only one of its two forms has, with their defaults.
_OF_A_MODEL = {"batch": 4, "count": 4, "device": "cpu", "dtype": "auto", "steps": None, "fix": True}
_OF_A_SERVER = {"waves": [2, 4, 8], "max_tokens": 64, "timeout": 60.0, "most_requests": 1000, "most_seconds": 600.0}


def check(options: argparse.Namespace) -> int:
    """`dglab check`: whether a request's text depends on its batch."""
    both = {name: getattr(options, name) for name in ("prompts", "seed", "to_json", "to_html")}
    elsewhere, where = (_OF_A_MODEL, "a model on this machine") if options.server else (_OF_A_SERVER, "a server")
    if misplaced := [name for name, default in elsewhere.items() if getattr(options, name) != default]:
        option = "no-fix" if misplaced[0] == "fix" else misplaced[0].replace("_", "-")
        raise LabError(f"check: --{option} is for {where}; leave it out")
    if options.server:
        from dglab_utils.runs.check_server import check_server_and_tell

        asked = {name: getattr(options, name) for name in _OF_A_SERVER}
        return check_server_and_tell(options.server, model=options.model, **asked, **both)
    if options.model is None:
        raise LabError("check: name a model, or give --server URL")
    from dglab_utils.runs.check import check_and_tell

    return check_and_tell(options.model, **{name: getattr(options, name) for name in _OF_A_MODEL}, **both)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dglab", description="Runs the lab's notebooks and builds its book.")
    parser.add_argument("--version", action="version", version=f"dglab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    folders = argparse.ArgumentParser(add_help=False)
    folders.add_argument(
        "--notebooks",
        type=Path,
        default=NOTEBOOKS,
        metavar="DIR",
        help="the notebooks' folder (default: the checkout's)",
    )
    profiles = argparse.ArgumentParser(add_help=False)
    profiles.add_argument(
        "--profile", default="quick", metavar="P", help="a named profile or a .yaml file (default: quick)"
    )
    profiles.add_argument(
        "--runs", type=Path, default=RUNS, metavar="DIR", help="where runs are kept (default: build/runs)"
    )
    profiles.add_argument(
        "--cell-timeout",
        type=_seconds,
        default=CELL_TIMEOUT,
        metavar="S",
        help="seconds one cell may take (default: %(default)s)",
    )

    listing = commands.add_parser(
        "list", parents=[folders], help="the notebooks, their questions, parameters and profiles"
    )
    listing.add_argument("names", nargs="*", metavar="NAME", help="name, number or prefix of a notebook (default: all)")
    listing.set_defaults(command=list_notebooks)

    running = commands.add_parser(
        "run", parents=[folders, profiles], help="run notebooks with papermill, all in one process"
    )
    running.add_argument("names", nargs="*", metavar="NAME", help="name, number or prefix of a notebook (default: all)")
    running.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="[NAME.]K=V",
        help="set a parameter; V is YAML: 3, [1, 2], cpu, null",
    )
    running.set_defaults(command=run_notebooks)

    book = commands.add_parser("book", parents=[profiles], help="build the book from saved runs")
    book.add_argument("--run", action="store_true", help="run every notebook first")
    book.set_defaults(command=make_book, notebooks=NOTEBOOKS, names=[], parameters=[])

    training = commands.add_parser(
        "train-nano",
        help="train the small model from nothing",
        epilog="A killed run goes on where it was when the same command is given again.",
    )
    training.add_argument("folder", type=Path, metavar="FOLDER", help="where the run is kept")
    training.add_argument("--demo", action="store_true", help="two minutes on two cores, to see it learn")
    training.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    training.add_argument("--rows", type=int, metavar="N", help="examples a step")
    training.add_argument("--learning-rate", type=float, metavar="X", help="its peak")
    training.add_argument("--objective", metavar="O", help="uniform noise as the model's own (default), or masked")
    training.add_argument("--precision", metavar="P", help="no (float32), bf16 or fp16")
    training.add_argument("--seed", type=int, metavar="N", help="of weights, data and noise")
    training.add_argument("--threads", type=int, metavar="N", help="PyTorch's, on a CPU")
    training.add_argument("--device", metavar="D", help="cpu, cuda or mps (default: the best there is)")
    training.set_defaults(command=train_nano)

    testing = commands.add_parser("test-nano", help="held-out accuracy of the small model")
    testing.add_argument(
        "model", nargs="?", default="nano", metavar="MODEL", help="nano, nano-young, nano-masked or a folder"
    )
    testing.add_argument("--a-level", type=int, default=50, metavar="N", help="prompts a level (default: 50)")
    testing.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and noise (default: 0)")
    testing.add_argument("--card", action="store_true", help="write the table into the checkpoint's README.md")
    testing.add_argument("--task", action="append", default=[], metavar="T", help="only this one; may be repeated")
    testing.set_defaults(command=test_nano)

    checking = commands.add_parser(
        "check",
        help="does a request's text depend on who shares its batch?",
        epilog="Exit status: 0 it does not; 1 it does, or numbers behind it do, or a server answers differently even "
        "alone; 2 could not be found out.",
    )
    checking.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a Hub id, nano, or a toy; with --server, its name there"
    )
    checking.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a prompt a line; of a model here all of as many tokens"
    )
    checking.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and noise (default: 0)")
    checking.add_argument("--json", dest="to_json", type=Path, metavar="FILE", help="write everything there too")
    checking.add_argument("--html", dest="to_html", type=Path, metavar="FILE", help="write the page there too")
    here = checking.add_argument_group("a model on this machine")
    here.add_argument("--batch", type=int, metavar="N", help="rows of the batch (default: 4)")
    here.add_argument("--count", type=int, metavar="N", help="prompts drawn without FILE (default: 4)")
    here.add_argument("--steps", type=int, metavar="N", help="cap on denoising steps, or new tokens of a causal model")
    here.add_argument("--device", metavar="D", help="cpu, cuda or mps (default: cpu)")
    here.add_argument("--dtype", metavar="T", help="float32, bfloat16, float16 (default: the checkpoint's own)")
    here.add_argument("--no-fix", dest="fix", action="store_false", help="do not look for what helps")
    there = checking.add_argument_group("a running server with OpenAI's API")
    there.add_argument("--server", metavar="URL", help="such as http://127.0.0.1:8000/v1")
    there.add_argument("--waves", type=int, nargs="+", metavar="N", help="requests sent together (default: 2 4 8)")
    there.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: 64)")
    there.add_argument("--timeout", type=float, metavar="S", help="seconds for a request (default: 60)")
    there.add_argument("--most-requests", type=int, metavar="N", help="refuse more (default: 1000)")
    there.add_argument(
        "--most-seconds",
        type=float,
        metavar="S",
        help="end, with what there is, after so long (default: 600)",
    )
    checking.set_defaults(command=check, **_OF_A_MODEL, **_OF_A_SERVER)

    lab = commands.add_parser(
        "lab",
        parents=[folders],
        help="open the notebooks in JupyterLab, on this machine only",
        epilog="Further options are JupyterLab's, such as --no-browser or --port=8890.",
    )
    lab.set_defaults(command=open_lab)
    return parser


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds, 1 or more")
    return int(text)
