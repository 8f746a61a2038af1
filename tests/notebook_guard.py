"""What a committed notebook must be, so that running it again compares something and a diff shows only changes.

`faults(path)` lists what is wrong with one notebook, a line each; `test_notebooks_guard.py` demands that there be
none. pytest --nbval reruns the notebooks; this looks only at the file. It exists because nbval passes a notebook
whose outputs were stripped: there is nothing left to differ.

    python tests/notebook_guard.py --normalise notebooks/*.ipynb     # what `make normalise` calls
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbstripout import strip_output
from nbval.plugin import find_comment_markers, find_metadata_tags

from dglab_utils.paths import written

MAX_LINES = 40
"""Of code in one cell."""
MIN_COMPARED = 3
"""Code cells whose output nbval compares, the completion marker not counted."""

# What changes with every run and says nothing. nbstripout's own list, and where papermill and widgets leave traces.
STRIPPED_KEYS = [
    "metadata.papermill",
    "metadata.signature",
    "metadata.widgets",
    "metadata.language_info.version",
    "cell.metadata.collapsed",
    "cell.metadata.ExecuteTime",
    "cell.metadata.execution",
    "cell.metadata.heading_collapsed",
    "cell.metadata.hidden",
    "cell.metadata.papermill",
    "cell.metadata.scrolled",
]
# What nbval leaves out of its comparison, beside what a cell's tags tell it to ignore.
NOT_COMPARED = ("image/png", "image/jpeg", "application/vnd.jupyter.widget-view+json")
# A path from the root of a disk that only the author's machine has.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/<])(?:/(?:home|root|Users|tmp|private|mnt|work|opt|usr|var)/|[A-Z]:\\)[^\s'\"<>)\]]*"
)


def faults(path: Path) -> list[str]:
    """What is wrong with the notebook, one line each; empty when nothing is."""
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        return [f"not a notebook: {str(error).splitlines()[0]}"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        *_shape_faults(code, path.stem),
        *_output_faults(code),
        *_comparison_faults(code),
        *_text_faults(notebook.cells),
        *_file_faults(path),
    ]


def normalise(path: Path) -> None:
    """Strips, in place, what changes with every run; outputs and execution counts stay, cell ids become numbers."""
    text = _normalised(path)
    if text != path.read_text(encoding="utf-8"):
        with written(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _normalised(path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    strip_output(notebook, keep_output=True, keep_count=True, keep_id=False, extra_keys=STRIPPED_KEYS)
    return nbformat.writes(notebook) + "\n"


def _shape_faults(code: list[Any], name: str) -> Iterator[str]:
    parameters = sum("parameters" in _tags(cell) for cell in code)
    if parameters != 1:
        yield f"{parameters} code cells are tagged `parameters`; tag exactly one"
    for n, cell in enumerate(code):
        if (lines := len(cell.source.splitlines())) > MAX_LINES:
            yield f"code cell {n} has {lines} lines; move code into the package until it has {MAX_LINES}"
    if not code or "complete" not in _tags(code[-1]):
        yield "the last code cell is not tagged `complete`"
    elif f"complete: {name}" not in "".join(_printed(code[-1])).splitlines():
        yield f"the last cell holds no output `complete: {name}`; run the notebook to its end"


def _text_faults(cells: list[Any]) -> Iterator[str]:
    for n, cell in enumerate(cells):
        if cell.cell_type == "markdown" and re.search(r"\$[^$]*\\\\[a-zA-Z][^$]*\$", cell.source):
            yield f"cell {n} has a formula with doubled backslashes, which is shown as letters; write one"


def _output_faults(code: list[Any]) -> Iterator[str]:
    host = re.compile(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w-])")
    for n, cell in enumerate(code):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"code cell {n} holds an error: {output.ename}: {output.evalue}"
            for text in _texts(output):
                if match := MACHINE_PATH.search(text):
                    yield f"code cell {n} printed a path of this machine: {match[0]}"
                if match := host.search(text):
                    yield f"code cell {n} printed this machine's name: {match[0]}"


def _comparison_faults(code: list[Any]) -> Iterator[str]:
    compared = sum(is_compared(cell) for cell in code if "complete" not in _tags(cell))
    if compared < MIN_COMPARED:
        yield (
            f"nbval would compare the output of {compared} code cells, at least {MIN_COMPARED} are wanted: "
            "print what must hold (counts, digests, orderings), and commit the outputs"
        )


def _file_faults(path: Path) -> Iterator[str]:
    if _normalised(path) != path.read_text(encoding="utf-8"):
        yield "not normalised: run `make normalise`"
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    if subprocess.run([str(ruff), "format", "--check", str(path)], capture_output=True).returncode:
        yield "not formatted: run `make normalise`"


def is_compared(cell: Any) -> bool:
    """Whether nbval, running this code cell, has an output to compare that could differ in substance."""
    options = dict(find_metadata_tags(cell.metadata)) | dict(find_comment_markers(cell.source))
    if options.get("skip") or options.get("check") is False:
        return False
    return any(_is_substance(output) for output in cell.outputs)


def _is_substance(output: Any) -> bool:
    if output.output_type == "stream":
        return output.name == "stdout" and bool(output.text.strip())
    data = output.get("data", {})
    if any(mime in data for mime in NOT_COMPARED):
        # The text beside a picture or a widget is its type's name.
        return any(mime not in (*NOT_COMPARED, "text/plain") for mime in data)
    return any(bool(str(content).strip()) for content in data.values())


def _printed(cell: Any) -> list[str]:
    return [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]


def _tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def _texts(output: Any) -> list[str]:
    """Texts of an output that a reader sees; pictures' bytes are left out."""
    texts = [output.get("text", "")]
    texts += [str(content) for mime, content in output.get("data", {}).items() if not mime.startswith("image/p")]
    return texts


if __name__ == "__main__":
    if sys.argv[1:2] != ["--normalise"] or len(sys.argv) < 3:
        sys.exit("usage: notebook_guard.py --normalise NOTEBOOK...")
    for name in sys.argv[2:]:
        normalise(Path(name))
