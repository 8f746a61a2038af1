"""The viewer as a live widget: a real JupyterLab on the loopback, a real kernel, both directions."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

CELLS = [
    """import sys
sys.path.insert(0, {tests!r})
from canvases import random_canvas
from dglab_utils.report.viewer import CanvasViewer
viewer = CanvasViewer(random_canvas(steps=9, length=32), decode=str, step=2)
viewer""",
    'viewer.step, viewer.cell, viewer.view, viewer.colour, viewer.token = 5, 17, "text", "entropy", "current"',
    'print("read:", viewer.step, viewer.cell, viewer.view, viewer.colour, viewer.token)',
    "viewer.step = 9",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook with these cells in a JupyterLab with settings and files of its own."""
    cells = [
        nbformat.v4.new_code_cell(cell.replace("{tests!r}", repr(str(Path(__file__).parents[1])))) for cell in CELLS
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "live.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += [f"--ServerApp.root_dir={tmp_path}", f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url=None"]
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, (tmp_path / "lab.log").read_text()[-2000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/tree/live.ipynb?token={token}"
    finally:
        server.terminate()  # JupyterLab ends its kernels on the way out
        server.wait(30)


def test_what_python_sets_is_seen_and_what_is_seen_is_read(lab: str, open_page: Callable[..., Any]) -> None:
    page = open_page(lab)
    page.set_default_timeout(90_000)
    code = page.locator(".jp-CodeCell")
    page.get_by_text("Python 3 (ipykernel) | Idle").first.wait_for()

    def run(cell: int) -> None:
        code.nth(cell).locator(".cm-content").click()
        page.keyboard.press("Control+Enter")

    run(0)
    viewer = code.nth(0).locator(".dglab")
    viewer.locator("[role=gridcell]").first.wait_for()
    assert viewer.count() == 1  # the live one, not the page's as well
    assert "3 of 9" in viewer.locator(".dg-run > dl").inner_text()

    run(1)
    viewer.get_by_text("6 of 9").first.wait_for()  # shown, and told to a screen reader a moment later
    viewer.locator(".dg-chosen[data-at='17']").wait_for()
    for name in ("text", "entropy", "canvas as read"):
        assert viewer.get_by_label(name, exact=True).is_checked()

    viewer.get_by_label("One step on").click()
    viewer.get_by_label("grid", exact=True).check(force=True)
    viewer.get_by_label("acceptance", exact=True).check(force=True)
    viewer.get_by_label("best guess", exact=True).check(force=True)
    viewer.locator("[data-at='4']").click()
    page.keyboard.press("ArrowRight")  # moves in the grid, not in the notebook
    run(2)
    code.nth(2).get_by_text("read: 6 5 grid accept argmax").wait_for()

    run(3)
    code.nth(3).get_by_text("LabError: step=9: this viewer's step is 0 to 8").last.wait_for()
    assert "7 of 9" in viewer.locator(".dg-run > dl").inner_text()
