"""The cost explorer: which of two models to serve on which card at which load, on a page without a kernel.

Python passes the shape, the cards and the fitted efficiencies; `static/cost_explorer.js` has the formulas of the cost
model and works out the rest, so that what the reader moves is computed and not looked up. The page loads that script
and `static/dglab.css`. This module knows the fields of the cost model's records, and not its code.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from IPython.display import HTML

from dglab_utils.errors import LabError

START: dict[str, Any] = {
    "hardware": "H100 SXM",
    "precision": "fp8",
    "batch": 8,
    "prompt": 1024,
    "output": 1024,
    "steps": 16,
}


def cost_explorer(
    shape: Any,
    hardware: Sequence[Any],
    precisions: Sequence[Any],
    *,
    software: Any,
    efficiency: Any,
    start: Mapping[str, Any] = START,
) -> HTML:
    """The explorer as a notebook output, `.data` as a string.

    Args:
        shape: a `ModelShape` of a diffusion model; it is compared with its autoregressive sibling.
        hardware, precisions: `Hardware` and `Precision` records to choose from; there is a card of one's own beside.
        software, efficiency: a `Software` and an `Efficiency` record.
        start: where the controls stand at first, as `START` has them; sliders take the nearest value they have.

    Raises:
        LabError: `start` names a card or a precision that is not among those given, or lacks a key.
    """
    if missing := START.keys() - start.keys():
        raise LabError(f"start: no {sorted(missing)[0]}; there must be {', '.join(START)}")
    for key, records in (("hardware", hardware), ("precision", precisions)):
        names = [record.name for record in records]
        if start[key] not in names:
            raise LabError(f"start: {key} is {start[key]!r}; there is {', '.join(names) or 'none'}")
    content = {
        "shape": asdict(shape),
        "hardware": [asdict(card) for card in hardware],
        "precisions": [asdict(precision) for precision in precisions],
        "software": asdict(software),
        "efficiency": asdict(efficiency),
        "start": dict(start),
    }
    return HTML(
        f'<div class="dglab-cost-explorer dglab-host" data-model="{html.escape(json.dumps(content))}">'
        "<p>The cost model with controls for card, precision and load. It needs the book's page with scripts on; the "
        "notebook's tables show the same model for fixed values.</p></div>"
    )
