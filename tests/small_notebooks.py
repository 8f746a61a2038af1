"""Notebooks of a few cells, written for a test."""

from __future__ import annotations

from pathlib import Path

import nbformat

PARAMETERS = "seeds: int = 2  # how many [1..5]"


def write_notebook(folder: Path, name: str, *cells: str, parameters: str = PARAMETERS, complete: bool = True) -> Path:
    """A notebook with a heading, a parameters cell, `cells` and, where asked, the completion marker."""
    v4 = nbformat.v4
    notebook = v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        cells=[
            v4.new_markdown_cell(f"# What does {name} ask?\n\nA first paragraph."),
            v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
            *(v4.new_code_cell(source) for source in cells),
        ],
    )
    if complete:
        notebook.cells.append(v4.new_code_cell(f"print('complete: {name}')", metadata={"tags": ["complete"]}))
    # Ids that do not change from one call to the next: nothing in a test should be random.
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path
