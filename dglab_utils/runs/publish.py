"""Turns an executed notebook into a page of the book.

What changes on the way, and why:

- papermill's pasted cell goes, and the parameters cell shows the values as run, with their types and comments;
- progress bars go (text on stderr and tqdm's widgets); other text on stderr stays, a warning is part of a run;
- a plotly figure, which papermill leaves as JSON that myst-nb does not show, becomes a `div.dglab-plot` that holds the
  JSON; book/_static/dglab_plots.js draws it when it scrolls into view;
- widget state goes: it would make each page load its widgets' code from a CDN. Widgets that matter bring HTML of their own;
- the completion marker's cell is hidden, and a last cell says how the page was made and how to make it again.

Nothing here measures, judges a run (see `execute.fault_of_run`) or knows how a page looks.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from dglab_utils.paths import written
from dglab_utils.runs.catalogue import Notebook
from dglab_utils.runs.execute import Record
from dglab_utils.runs.parameters import with_values

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
DEFAULT_HEIGHT = 450  # px, plotly's own; kept free so that the page does not jump when a figure is drawn
_PROGRESS = re.compile(r"\d+%\|")


def publish(notebook: Notebook, folder: Path, page: Path) -> Path:
    """Writes the page of a complete run.

    Args:
        folder: holds the run, `NAME.ipynb` and `NAME.json`.
        page: the file to write, under a book's source folder that lies two levels below the root.
    """
    executed = nbformat.read(folder / f"{notebook.name}.ipynb", as_version=4)
    record = Record.load(folder / f"{notebook.name}.json")
    with written(page) as temporary:
        nbformat.write(as_page(executed, record), temporary)
    return page


def as_page(executed: NotebookNode, record: Record) -> NotebookNode:
    """The page's notebook; `executed` is left as it was."""
    cells = []
    for original in executed.cells:
        tags = original.metadata.get("tags", [])
        if "injected-parameters" in tags:
            continue
        cell = NotebookNode(json.loads(json.dumps(original)))
        cell = nbformat.from_dict(cell)
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in ("tags", "mystnb")})
        if cell.cell_type == "code":
            if "parameters" in tags:
                cell.source = with_values(cell.source, record.parameters)
            if "complete" in tags:
                cell.metadata["tags"] = [*tags, "remove-cell"]
            cell.outputs = [shown for output in cell.outputs if (shown := _output(output)) is not None]
        cells.append(cell)
    cells.append(nbformat.v4.new_markdown_cell(_provenance(record), id="how-this-page-was-made"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def plot_html(figure: dict[str, Any]) -> str:
    """The HTML that stands for a plotly figure on a page: its JSON, a name for screen readers, room to be drawn in."""
    layout = figure.get("layout", {})
    title = layout.get("title", "")
    title = title.get("text", "") if isinstance(title, dict) else title
    label = html.escape(re.sub(r"<[^>]+>", " ", title or "").strip() or "Figure", quote=True)
    # `<` would let a string such as "</script>" in the data end the element.
    data = json.dumps({"data": figure["data"], "layout": layout}, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="dglab-plot" role="img" aria-label="{label}" style="min-height:{layout.get("height", DEFAULT_HEIGHT)}px">'
        f'<script type="application/json">{data}</script>'
        "<noscript>This figure is drawn by JavaScript, which is switched off; the text around it says what it shows.</noscript>"
        "</div>"
    )


def _output(output: NotebookNode) -> NotebookNode | None:
    """An output as the page shows it; None where it does not."""
    if output.output_type == "stream":
        is_progress = output.name == "stderr" and ("\r" in output.text or _PROGRESS.search(output.text))
        return None if is_progress else output
    data = output.get("data", {})
    if PLOTLY in data:
        return nbformat.v4.new_output("display_data", data={"text/html": plot_html(data[PLOTLY])})
    if WIDGET in data:
        del data[WIDGET]
        if "text/html" not in data:  # only the text of a widget: "HBox(children=..." or a progress bar
            return None
    return output


def _provenance(record: Record) -> str:
    command = f"dglab run {record.notebook} --profile {shlex.quote(record.profile)}"
    values = "".join(f" \\\n    -p {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in record.parameters.items())
    return (
        "---\n\n"
        f"**How this page was made.** It is the notebook {{download}}`{record.notebook}.ipynb "
        f"<../../notebooks/{record.notebook}.ipynb>` as it ran on {record.started[:10]} in {record.seconds:.0f} s, with the profile "
        f"`{record.profile}`. [Rerun it](../rerun.md) with the same parameters:\n\n```bash\n{command}{values}\n```\n"
    )
