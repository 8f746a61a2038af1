"""The `dglab` command: what it means by its arguments, and that bad input runs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_notebooks import write_notebook

from dglab_utils.errors import LabError
from dglab_utils.paths import NOTEBOOKS, PROFILES, ROOT
from dglab_utils.runs import cli
from dglab_utils.runs.catalogue import find, notebooks_in, overrides, plans, read_profile, select

CELL = 'seeds: int = 2  # how many [1..5]\nbound: float = 0.1  # nats [> 0]\nname: str = "a"  # a name'
OTHER = "steps: list[int] = [1]  # which [0..48]\nseeds: int = 1  # how many [1..5]"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with three notebooks and a profile; what they would write when run is `ran` beside them."""
    mark = f"open({str(tmp_path / 'ran')!r}, 'w')"
    write_notebook(tmp_path / "notebooks", "01_untrained", mark, parameters=CELL)
    write_notebook(tmp_path / "notebooks", "02_waves", mark, parameters=OTHER)
    write_notebook(tmp_path / "notebooks", "02_waves_again", mark, parameters=CELL)
    (tmp_path / "notebooks" / "profiles").mkdir()
    (tmp_path / "notebooks" / "profiles" / "quick.yaml").write_text("all: {seeds: 3}\n02_waves: {steps: [4]}\n")
    return tmp_path


def dglab(lab: Path, *arguments: str) -> int:
    return cli.main([arguments[0], "--notebooks", str(lab / "notebooks"), *arguments[1:]])


def test_list_tells_name_question_parameters_and_profiles(lab, capsys):
    assert dglab(lab, "list") == 0
    text = capsys.readouterr().out
    assert "01_untrained\n    What does 01_untrained ask?" in text
    assert "seeds: int = 2" in text and "how many [1..5]" in text and "profiles: quick" in text
    assert dglab(lab, "list", "1") == 0
    assert "02_waves" not in capsys.readouterr().out


def test_a_notebook_is_meant_by_name_number_or_prefix(lab):
    notebooks = notebooks_in(lab / "notebooks")
    assert find("1", notebooks).name == find("01", notebooks).name == find("01_unt", notebooks).name == "01_untrained"
    assert find("02_waves", notebooks).name == "02_waves", "a full name is meant, though another one begins with it"
    assert [n.name for n in select(["02_waves", "01", "1"], notebooks)] == ["01_untrained", "02_waves"]
    assert len(select([], notebooks)) == 3
    with pytest.raises(LabError, match="'2' is ambiguous: 02_waves, 02_waves_again"):
        find("2", notebooks)


def test_profile_then_command_line_then_the_specific_one(lab):
    notebooks = notebooks_in(lab / "notebooks")
    profile = read_profile(lab / "notebooks" / "profiles" / "quick.yaml", notebooks)
    given = overrides(["bound=1e-3", "02_waves.steps=[1, 2]", "1.name='07'"], notebooks)
    values = {plan.notebook.name: plan.values for plan in plans(notebooks, profile, given)}
    assert values["01_untrained"] == {"seeds": 3, "bound": 0.001, "name": "07"}
    assert values["02_waves"] == {"steps": [1, 2], "seeds": 3}
    assert values["02_waves_again"] == {"seeds": 3, "bound": 0.001, "name": "a"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["03_x"], "no notebook '03_x'; there is: 01_untrained"),
        (["02_waes"], "no notebook '02_waes'; did you mean '02_waves'?"),
        (["2"], "ambiguous"),
        (["--profile", "quik"], "no profile 'quik'; did you mean 'quick'?"),
        (["--profile", "missing.yaml"], "missing.yaml: no such profile file"),
        (["-p", "sede=3"], "no parameter 'sede' in 01_untrained, 02_waves, 02_waves_again; did you mean 'seeds'?"),
        (["1", "-p", "steps=[1]"], "no parameter 'steps' in 01_untrained"),
        (["1", "-p", "02_waves.seeds=3"], "no notebook '02_waves'"),
        (["-p", "seeds"], "write -p parameter=value"),
        (["-p", "seeds=[1"], "is not a YAML value"),
        (["-p", "seeds=9"], "01_untrained: seeds = 9 is out of bounds; allowed: int, 1..5"),
        (["-p", "seeds=true"], "seeds = True has the wrong type"),
        (["-p", "seeds=1.0"], "seeds = 1.0 has the wrong type"),
        (["-p", "seeds="], "seeds = None has the wrong type"),
        (["-p", "bound=.nan"], "bound = nan is not finite"),
        (["-p", "name=12"], "name = 12 has the wrong type"),
        (["-p", "steps=[1, 99]"], "holds 99, which is out of bounds"),
        (["-p", 'seeds=!!int "x"'], "is not a YAML value"),
        (["-p", 'seeds=!!int ""'], "is not a YAML value"),
        (["-p", 'bound=!!float "x"'], "is not a YAML value"),
        (["-p", "name=!!timestamp x"], "is not a YAML value"),
        (["-p", "name=!!bool x"], "is not a YAML value"),
        (["-p", "name=!!binary x"], "is not a YAML value"),
        (["-p", "name=!!python/name:os.system"], "is not a YAML value"),
        (["-p", "seeds=" + "1" * 5000], "is not a YAML value"),
        (["-p", "steps=" + "[" * 3000], "is not a YAML value"),
    ],
)
def test_bad_input_is_one_line_status_2_and_runs_nothing(lab, capsys, arguments, says):
    assert dglab(lab, "run", "--runs", str(lab / "runs"), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("dglab: ") and says in captured.err
    assert not (lab / "ran").exists() and not (lab / "runs").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- 1", "a profile maps"),
        ("02_waves: 3", "a profile maps"),
        ("02_waes: {}", "no notebook '02_waes'; did you mean"),
        ("02_waves: {bound: 1.0}", "02_waves: no parameter 'bound'"),
        ("all: {sede: 1}", "all: no parameter 'sede'"),
        ("a: [", "not YAML"),
        ("all: {seeds: 3, seeds: 4}", "not YAML that can be read (seeds is given twice"),
        ("02_waves: {seeds: 3}\nall: {seeds: 4}\n02_waves: {seeds: 4}", "02_waves is given twice"),
        ("all: {'seeds': 3, seeds: 4}", "seeds is given twice"),
        ('all: {seeds: !!int "x"}', "a value does not fit its tag"),
        ("all: {seeds: " + "[" * 3000 + "]" * 3000 + "}", "nested too deep"),
        ("all: {seeds: " + "{a: " * 3000 + "1" + "}" * 3000 + "}", "nested too deep"),
        ("02_waves: {seeds: 6}", "02_waves: seeds = 6 is out of bounds"),
    ],
)
def test_a_bad_profile_file_is_one_line_status_2(lab, capsys, content, says):
    (lab / "mine.yaml").write_text(content)
    assert dglab(lab, "run", "--runs", str(lab / "runs"), "--profile", str(lab / "mine.yaml")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error and not (lab / "runs").exists()


def test_a_merge_key_is_no_second_key(lab):
    (lab / "mine.yaml").write_text("02_waves: &w {seeds: 3}\n02_waves_again: {<<: *w, seeds: 4}\n")
    read = read_profile(lab / "mine.yaml", notebooks_in(lab / "notebooks"))
    assert read["02_waves"] == {"seeds": 3} and read["02_waves_again"] == {"seeds": 4}


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/dglab", "/proc/self"])
def test_a_folder_that_cannot_keep_runs_is_one_line_status_2(lab, capsys, where):
    (lab / "file").write_text("kept")
    (lab / "fd.yaml").write_text("all: {seeds: 3}")  # /proc/self/fd is there, and nobody can write in it
    if where.startswith("/proc") and not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc here")
    assert dglab(lab, "run", "--runs", str(lab / where), "--profile", str(lab / "fd.yaml")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{lab / where / 'fd'}: no run can be kept there" in error
    assert "give --runs another folder" in error
    assert (lab / "file").read_text() == "kept" and not (lab / "ran").exists()


def test_ctrl_c_while_the_command_loads_is_no_traceback(tmp_path):
    """Started as the installed script starts it; SIGINT comes while `cli` imports its first library."""
    (tmp_path / "yaml.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)\n"
    )
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["dglab"].split(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", script, "list"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dglab: interrupted\n")


def test_a_profile_file_may_not_take_a_named_profiles_place(lab, capsys):
    (lab / "quick.yaml").write_text("")
    assert dglab(lab, "run", "--runs", str(lab / "runs"), "--profile", str(lab / "quick.yaml")) == 2
    assert "give the file another name" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"cells": [{"cell_type": "code", "source": "", "metadata": {}}]}'])
def test_a_damaged_notebook_is_named(lab, capsys, content):
    (lab / "notebooks" / "03_broken.ipynb").write_text(content)
    assert dglab(lab, "list") == 2
    assert "03_broken.ipynb" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_run_from_the_command_line(lab, capsys):
    assert dglab(lab, "run", "1", "--runs", str(lab / "runs"), "-p", "seeds=5") == 0
    out = capsys.readouterr().out
    assert "01_untrained  ok" in out and "1 of 1 notebooks complete" in out
    assert (lab / "ran").exists() and (lab / "runs" / "quick" / "01_untrained.ipynb").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["walk"],
        ["run", "--cell-timeout", "0"],
        ["run", "--walk"],
        ["book", "extra"],
        ["list", "--profile", "quick"],
    ],
)
def test_argparse_refuses_with_status_2(arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_arguments_are_checked_without_the_slow_libraries():
    """`list` and every refusal come before torch, papermill or a notebook library is loaded."""
    code = (
        "import sys; from dglab_utils.runs import cli; cli.main(['run', '-p', 'x']); "
        "print([m for m in ('torch', 'papermill', 'nbformat', 'plotly', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_named_profiles_fit_the_notebooks(path):
    notebooks = notebooks_in(NOTEBOOKS)
    assert len(plans(notebooks, read_profile(path, notebooks))) == len(notebooks)


@pytest.mark.timeout(120)
def test_lab_serves_the_notebooks_on_the_loopback_interface(lab):
    """A real JupyterLab on a free port: it lists the notebooks, and takes its options from the command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dglab_utils.runs", "lab", "--notebooks", str(lab / "notebooks")]
    command += ["--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token=secret"]
    log = lab / "lab.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}/api/contents?token=secret"
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
                names = {entry["name"] for entry in json.load(reply)["content"]}
                break
            time.sleep(0.3)
        assert {"01_untrained.ipynb", "02_waves.ipynb"} <= names
        assert f"127.0.0.1:{port}" in log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def test_lab_saves_nothing_by_itself(monkeypatch, tmp_path):
    started = {}
    monkeypatch.setattr(cli, "BUILD", tmp_path)
    monkeypatch.delenv("JUPYTERLAB_SETTINGS_DIR", raising=False)
    monkeypatch.setattr(
        cli.subprocess,
        "run",
        lambda command, env: started.update(env=env, command=command) or SimpleNamespace(returncode=0),
    )
    assert cli.main(["lab"]) == 0
    settings = Path(started["env"]["JUPYTERLAB_SETTINGS_DIR"])
    plugin = settings / "@jupyterlab" / "docmanager-extension" / "plugin.jupyterlab-settings"
    assert json.loads(plugin.read_text()) == {"autosave": False}
    assert "--ServerApp.ip=127.0.0.1" in started["command"]


def test_a_reader_that_leaves_ends_the_command_quietly(lab):
    """`dglab list | head -1`: the pipe is closed while the command still writes."""
    command = [sys.executable, "-m", "dglab_utils.runs", "list", "--notebooks", str(lab / "notebooks")]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
