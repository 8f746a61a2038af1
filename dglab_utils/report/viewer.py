"""The canvas viewer: a recorded canvas, step by step, with a kernel and without one.

`CanvasViewer(trace)` as a cell's last line gives both at once. In JupyterLab it is a live widget whose `step`, `cell`,
`view`, `colour` and `token` can be read and set from Python. Anywhere else the output's HTML holds the packed run and a
readable text, and a page that loads `static/canvas_viewer.js` and `static/dglab.css` turns it into the same viewer.

How a run is packed is canvas_payload.py's business, and how it looks is the script's.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from dglab_utils.errors import LabError
from dglab_utils.report.canvas_payload import Decode, pack
from dglab_utils.sampling.trace import CanvasTrace

STATIC = Path(__file__).parent / "static"
BYTES_PER_CANVAS = 60_000
"""What a run of up to 48 steps of 256 positions may add to a page, all included; a larger run in proportion."""

_CHOICES = {"view": ("grid", "text"), "colour": ("accept", "entropy", "kl"), "token": ("argmax", "current")}


class CanvasViewer(anywidget.AnyWidget):
    """One run, or two side by side in step.

    Args:
        trace: the run.
        other: a second run of the same canvas length. The one with fewer steps stays at its last.
        decode: token id to text: a function such as `tokenizer.decode`, a list indexed by id, or None to show ids.
        labels: what to call the runs, one string a run.
        **state: initial values of the traitlets below.

    Traitlets, followed in both directions:
        step: from 0.
        cell: the position in detail; -1 for none.
        view: "grid" or "text".
        colour: "accept", "entropy", or "kl" where the runs kept their logits.
        token: "argmax", the best guess; or "current", the canvas as the model read it.

    Raises:
        LabError: a trace that cannot be shown (see `canvas_payload.pack`), runs of different lengths, or a value that a
            traitlet does not have.
    """

    _esm = (STATIC / "canvas_viewer.js").read_text(
        encoding="utf-8"
    ) + "\nexport default { render: dglabCanvas.render };\n"
    _css = (STATIC / "dglab.css").read_text(encoding="utf-8")

    step = traitlets.Int(0).tag(sync=True)
    cell = traitlets.Int(-1).tag(sync=True)
    view = traitlets.Unicode("grid").tag(sync=True)
    colour = traitlets.Unicode("accept").tag(sync=True)
    token = traitlets.Unicode("argmax").tag(sync=True)
    _run = traitlets.Unicode().tag(sync=True)
    _other = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        trace: CanvasTrace,
        other: CanvasTrace | None = None,
        *,
        decode: Decode = None,
        labels: Sequence[str] = (),
        **state: Any,
    ) -> None:
        self._traces = [trace] if other is None else [trace, other]
        if len({t.canvas_length for t in self._traces}) > 1:
            lengths = " and ".join(str(t.canvas_length) for t in self._traces)
            raise LabError(f"the two runs have canvases of {lengths} positions: compare runs of one canvas length")
        if labels and len(labels) != len(self._traces):
            raise LabError(f"{len(labels)} labels for {len(self._traces)} runs: pass one a run, or none")
        self._decode = decode
        self._labels = list(labels) or [""] * len(self._traces)
        # The widget's channel has no budget: everything is sent.
        runs = [pack(t, decode, label=name) for t, name in zip(self._traces, self._labels, strict=True)]
        super().__init__(_run=runs[0], _other=runs[1] if other is not None else "", **state)

    @traitlets.validate("step")
    def _valid_step(self, proposal: dict[str, Any]) -> int:
        steps = max(t.steps for t in self._traces)
        return _in_range("step", proposal["value"], 0, steps - 1)

    @traitlets.validate("cell")
    def _valid_cell(self, proposal: dict[str, Any]) -> int:
        return _in_range("cell", proposal["value"], -1, self._traces[0].canvas_length - 1)

    @traitlets.validate("view", "colour", "token")
    def _valid_choice(self, proposal: dict[str, Any]) -> str:
        name, value = proposal["trait"].name, proposal["value"]
        if value not in _CHOICES[name]:
            raise LabError(f"{name}={value!r}: the viewer has {', '.join(_CHOICES[name])}")
        if value == "kl" and any(t.logits is None for t in self._traces):
            raise LabError("colour='kl' needs the logits: record the trace with observe(model, keep_logits=True)")
        return value

    def html(self) -> str:
        """The static half, as the viewer stands now: a div that holds its state and the packed runs.

        Inside it are the runs' final texts, for who has no script.
        """
        inside = "".join(self._fallback(i) for i in range(len(self._traces)))
        runs = ""
        for i, (name, trace, label) in enumerate(zip(("run", "other"), self._traces, self._labels, strict=False)):
            cells = max(1.0, trace.steps * trace.canvas_length / (48 * 256))
            budget = int(BYTES_PER_CANVAS * cells) - len(self._fallback(i).encode()) - 400
            runs += f' data-{name}="{pack(trace, self._decode, budget, label)}"'
        state = html.escape(json.dumps({name: getattr(self, name) for name in ("step", "cell", *_CHOICES)}))
        return (
            f'<div class="dglab-canvas dglab-host" data-state="{state}"{runs}>'
            f'<div class="dglab dglab-fallback">{inside}</div></div>'
        )

    def _fallback(self, i: int) -> str:
        trace, label = self._traces[i], self._labels[i]
        end = "its stop test ended it" if trace.stopped else "the cap on steps ended it"
        ids = trace.argmax[-1].tolist()
        if self._decode is None:
            text = " ".join(str(token) for token in ids)
        else:
            text = "".join(self._decode(t) if callable(self._decode) else self._decode[t] for t in ids)
        name = f"{html.escape(label)}: a" if label else "A"
        return (
            f"<p>{name} canvas of {trace.canvas_length} positions, denoised in {trace.steps} steps; {end}. "
            f"Its final text:</p><pre>{html.escape(text)}</pre>"
        )

    def __repr__(self) -> str:
        shapes = " | ".join(f"{t.steps} steps x {t.canvas_length} positions" for t in self._traces)
        return f"CanvasViewer({shapes})"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": self.html()}, metadata


def standalone_html(body: str, script: str = "canvas_viewer.js", title: str = "Canvas viewer") -> str:
    """A whole page around `body` with one of the lab's scripts and the style inside: it opens from a disk, offline."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 60rem; margin: 0 auto; padding: 1rem; }}
{(STATIC / "dglab.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{body}
<script>
{(STATIC / script).read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise LabError(f"{name}={value}: this viewer's {name} is {low} to {high}")
    return value
