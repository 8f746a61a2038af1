"""Turns an executed notebook into a page of the book.

What changes on the way, and why:

- papermill's pasted cell goes, and the parameters cell shows the values as run, with their types and comments;
- progress bars go (text on stderr and tqdm's widgets); other text on stderr stays, a warning is part of a run;
- a plotly figure, which papermill leaves as JSON that myst-nb does not show, becomes a `div.dglab-plot` that holds the
  JSON; book/_static/dglab_plots.js draws it when it scrolls into view;
- widget state goes: it would make each page load the widgets' code from a CDN. A widget that matters brings HTML;
- the completion marker's cell is hidden, and a last cell says how the page was made and how to make it again.

Nothing here measures, judges a run (see `execute.fault_of_run`) or knows how a page looks.
"""

from __future__ import annotations

import copy
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
        cell = copy.deepcopy(original)
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
    """The HTML that stands for a plotly figure: its title as a caption (it wraps on a phone), its JSON, room."""
    layout = dict(figure.get("layout", {}))
    title = layout.pop("title", "")
    title = (title.get("text") or "" if isinstance(title, dict) else title).replace("<br>", " ")
    # Room for a title that is no longer there; what stands in the margin else (a legend, subplot titles) keeps its own.
    margin = dict(layout.get("margin", {}))
    if title and "t" not in margin:
        layout["margin"] = margin | {"t": 30}
    label = html.escape(re.sub(r"</?[a-zA-Z][^>]*>", "", title).strip() or "Figure")
    caption = f"<figcaption>{label}</figcaption>" if title else ""
    height = layout.get("height", DEFAULT_HEIGHT)
    # `<` would let a string such as "</script>" in the data end the element.
    data = json.dumps({"data": figure["data"], "layout": layout}, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="dglab-figure">{caption}'
        f'<div class="dglab-plot" role="img" aria-label="{label}" style="min-height:{height}px">'
        f'<script type="application/json">{data}</script>'
        "<noscript>This figure is drawn by JavaScript, which is off; the text around it says what it shows.</noscript>"
        "</div></figure>"
    )


def _output(output: NotebookNode) -> NotebookNode | None:
    """An output as the page shows it; None where it does not."""
    if output.output_type == "stream":
        if output.name == "stderr":
            output.text = _without_progress(output.text)
        return output if output.text else None
    data = output.get("data", {})
    if PLOTLY in data:
        return nbformat.v4.new_output("display_data", data={"text/html": plot_html(data[PLOTLY])})
    if WIDGET in data:
        del data[WIDGET]
        if "text/html" not in data:  # only the text of a widget: "HBox(children=..." or a progress bar
            return None
    return output


def _without_progress(text: str) -> str:
    """Text on stderr as it would stand on a screen in the end, progress bars left out."""
    final = [line.rpartition("\r")[2] for line in text.rstrip("\r").splitlines()]
    return "\n".join(line for line in final if line.strip() and not _PROGRESS.search(line))


def _provenance(record: Record) -> str:
    name = record.notebook
    assignments = [shlex.quote(f"{key}={json.dumps(value)}") for key, value in record.parameters.items()]
    command = " \\\n    -p ".join([f"dglab run {name}", *assignments])
    return (
        "---\n\n**How this page was made.** It is the notebook "
        f"{{download}}`{name}.ipynb <../../notebooks/{name}.ipynb>` as it ran on {record.started[:10]} in "
        f"{record.seconds:.0f} s, with the profile `{record.profile}`. [Rerun it](../rerun.md) with the same "
        f"parameters:\n\n```bash\n{command}\n```\n"
    )
