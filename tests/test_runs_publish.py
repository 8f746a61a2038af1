"""Publishing: what a page shows of a run, and what it does not."""

from __future__ import annotations

import base64
import json
import re

import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest

from dglab_utils.runs.execute import Record
from dglab_utils.runs.publish import PLOTLY, WIDGET, as_page, plot_html

v4 = nbformat.v4
RECORD = Record(
    notebook="01_a",
    profile="quick",
    parameters={"seeds": 3, "names": ["a b"]},
    started="2026-11-30T09:00:00+00:00",
    seconds=12.3,
)
CELL = 'seeds: int = 1  # how many\nnames: list[str] = ["x"]  # which'


def page(*outputs: nbformat.NotebookNode) -> nbformat.NotebookNode:
    executed = v4.new_notebook(
        metadata={"papermill": {"output_path": "/somewhere"}, "widgets": {"state": {}}},
        cells=[
            v4.new_markdown_cell("# A?"),
            v4.new_code_cell(CELL, metadata={"tags": ["parameters"], "papermill": {"status": "completed"}}),
            v4.new_code_cell("# Parameters\nseeds = 3", metadata={"tags": ["injected-parameters"]}),
            v4.new_code_cell("work()", outputs=list(outputs)),
            v4.new_code_cell("print('complete: 01_a')", metadata={"tags": ["complete"]}),
        ],
    )
    before = json.dumps(executed)
    result = as_page(executed, RECORD)
    assert json.dumps(executed) == before, "the run itself is left as it was"
    nbformat.validate(result)
    return result


def outputs_of(*outputs: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return page(*outputs).cells[2].outputs


def figure_in(html: str) -> dict:
    found = re.search(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def test_the_parameters_cell_shows_the_values_as_run_once():
    cells = page().cells
    assert [c.cell_type for c in cells] == ["markdown", "code", "code", "code", "markdown"]
    assert cells[1].source == "seeds: int = 3  # how many\nnames: list[str] = ['a b']  # which"
    assert cells[3].metadata["tags"] == ["complete", "remove-cell"]
    assert not any("papermill" in c.metadata for c in cells) and "widgets" not in page().metadata
    assert "papermill" not in page().metadata


def test_the_page_says_how_it_was_made():
    text = page().cells[-1].source
    assert "2026-11-30 in 12 s" in text and "profile `quick`" in text
    assert "dglab run 01_a \\\n    -p seeds=3 \\\n    -p 'names=[\"a b\"]'" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\r  0%|          | 0/3\r100%|###| 3/3 [00:00]\n", None),
        ("UserWarning: odd\n", "UserWarning: odd"),
        ("UserWarning: odd\n\r 50%|##  | 1/2\r100%|####| 2/2\n", "UserWarning: odd"),
        ("seeds: 100%|##########| 3/3 [00:00<00:00]", None),
    ],
)
def test_progress_bars_go_and_warnings_stay(text, shown):
    found = outputs_of(v4.new_output("stream", name="stderr", text=text))
    assert [output.text for output in found] == ([] if shown is None else [shown])


def test_text_on_stdout_html_and_pictures_stay():
    kept = [
        v4.new_output("stream", name="stdout", text="100%| is not a bar here\n"),
        v4.new_output("display_data", data={"text/html": "<b>x</b>", "text/plain": "x"}),
        v4.new_output("display_data", data={"image/png": base64.b64encode(b"png").decode()}),
        v4.new_output("execute_result", data={"text/plain": "3"}, execution_count=1),
    ]
    assert outputs_of(*kept) == kept


def test_a_widget_is_shown_by_its_html_or_not_at_all():
    view = {"model_id": "1", "version_major": 2, "version_minor": 0}
    bar = v4.new_output("display_data", data={WIDGET: view, "text/plain": "  0%|          | 0/3"})
    viewer = v4.new_output("display_data", data={WIDGET: view, "text/html": "<div>viewer</div>", "text/plain": "V()"})
    (shown,) = outputs_of(bar, viewer)
    assert WIDGET not in shown.data and shown.data["text/html"] == "<div>viewer</div>"


def test_a_plotly_figure_becomes_a_labelled_div_with_its_data():
    figure = go.Figure(go.Scatter(x=np.arange(3.0), y=[1, 4, 9], name="a </script><b>&"))
    figure.update_layout(title='Steps, by <b>growth</b> < 2 & "more"', height=300)
    output = v4.new_output("display_data", data={PLOTLY: json.loads(figure.to_json()), "text/plain": "Figure"})
    (shown,) = outputs_of(output)
    html = shown.data["text/html"]
    assert list(shown.data) == ["text/html"]
    assert html.count("<script") == html.count("</script>") == 1, "nothing in the data can end the script element"
    assert 'aria-label="Steps, by growth &lt; 2 &amp; &quot;more&quot;"' in html and "min-height:300px" in html
    assert "<noscript>" in html and "<figcaption>Steps, by growth" in html
    data = figure_in(html)
    assert data["data"][0]["name"] == "a </script><b>&" and data["data"][0]["y"] == [1, 4, 9]
    assert "title" not in data["layout"] and data["layout"]["margin"]["t"] == 30
    x = data["data"][0]["x"]
    values = np.frombuffer(base64.b64decode(x["bdata"]), dtype=x["dtype"]) if isinstance(x, dict) else x
    assert list(values) == [0.0, 1.0, 2.0], "arrays are in a form that plotly.js reads"


def test_a_figure_without_a_title_still_has_a_name():
    html = plot_html({"data": [], "layout": {}})
    assert 'aria-label="Figure"' in html and "<figcaption>" not in html and "margin" not in figure_in(html)["layout"]
