"""The viewer's Python half: sizes, what the output holds, and what is refused. tests/browser has the other half."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import struct
import zlib

import numpy as np
import pytest
from canvases import random_canvas

from dglab_utils.errors import LabError
from dglab_utils.report.canvas_payload import pack
from dglab_utils.report.explorable import entropy_bound_explorable
from dglab_utils.report.viewer import BYTES_PER_CANVAS, STATIC, CanvasViewer, standalone_html
from dglab_utils.sampling.ramp import ConfidenceRamp, run_ramp


def header(payload: str) -> dict:
    raw = base64.b64decode(payload)
    (length,) = struct.unpack_from("<I", raw)
    return json.loads(zlib.decompress(raw[4 : 4 + length], -15))


def word(token: int) -> str:
    return f" t{token * 7919 % 9973}"


@pytest.mark.parametrize("decode", [None, word], ids=["ids", "texts"])
@pytest.mark.parametrize("vocab_size", [2, 1000, 32_768, 262_144])
def test_a_random_run_fits_its_budget(vocab_size: int, decode) -> None:
    page = CanvasViewer(random_canvas(vocab_size=vocab_size), decode=decode).html()
    assert len(page.encode()) <= BYTES_PER_CANVAS


def test_a_random_run_with_kl_fits_its_budget() -> None:
    viewer = CanvasViewer(random_canvas(vocab_size=1000, keep_logits=True), decode=word)
    assert len(viewer.html().encode()) <= BYTES_PER_CANVAS


def test_two_runs_have_two_budgets() -> None:
    viewer = CanvasViewer(random_canvas(vocab_size=262_144), random_canvas(vocab_size=262_144, seed=1), decode=word)
    assert BYTES_PER_CANVAS < len(viewer.html().encode()) <= 2 * BYTES_PER_CANVAS


def test_a_run_that_converges_keeps_everything() -> None:
    page = CanvasViewer(run_ramp(ConfidenceRamp(), keep_logits=True), decode=word).html()
    kept = header(re.search('data-run="([^"]+)"', page).group(1))
    assert (kept["currentKept"], kept["levels"], kept["klLeftOut"]) == ("all", 255, False)


def test_a_tight_budget_leaves_out_what_tells_least_first() -> None:
    trace = random_canvas(keep_logits=True)
    sizes = range(95_000, 35_000, -4_000)
    kept = [header(pack(trace, word, budget)) for budget in sizes]
    ranks = [("all", "kept", "none").index(k["currentKept"]) for k in kept]
    assert ranks == sorted(ranks) and ranks[0] == 0 and ranks[-1] == 2
    lost = [k["klLeftOut"] for k in kept]
    assert lost == sorted(lost) and not lost[0] and lost[-1]


def test_equal_runs_give_equal_bytes() -> None:
    first, second = (CanvasViewer(random_canvas(), decode=word).html() for _ in range(2))
    assert first == second
    assert first != CanvasViewer(random_canvas(seed=1), decode=word).html()


def test_the_output_is_a_live_view_and_a_readable_page() -> None:
    trace = run_ramp(ConfidenceRamp(growth=4.0))
    viewer = CanvasViewer(trace, decode=lambda token: f"<b>{token}</b>")
    data, _ = viewer._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == viewer.model_id
    assert data["text/plain"] == "CanvasViewer(6 steps x 256 positions)"
    page = data["text/html"]
    assert "256 positions, denoised in 6 steps; its stop test ended it" in page
    assert f"&lt;b&gt;{trace.argmax[-1, 0]}&lt;/b&gt;" in page
    assert "<b>" not in page


def test_markup_in_tokens_and_labels_stays_out_of_the_page() -> None:
    hostile = '"><img src=x onerror=alert(1)></script><script>alert(2)</script>'
    page = CanvasViewer(random_canvas(), decode=lambda _: hostile, labels=[hostile]).html()
    assert set(re.findall("<([a-z]+)", page)) == {"div", "p", "pre"}


def test_a_standalone_page_asks_for_nothing() -> None:
    page = standalone_html(CanvasViewer(random_canvas()).html(), title="<canvas>")
    assert "<title>&lt;canvas&gt;</title>" in page
    for text in (page, *(file.read_text() for file in STATIC.iterdir())):
        assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<link|@import|\bsrc=|url\(|fetch\(|import\(", text)


def test_traitlets_take_what_the_viewer_has() -> None:
    viewer = CanvasViewer(random_canvas(steps=5), random_canvas(steps=9, seed=1), step=8, cell=255, colour="entropy")
    viewer.view, viewer.token = "text", "current"
    assert (viewer.step, viewer.cell, viewer.view, viewer.colour) == (8, 255, "text", "entropy")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 48}, "step=48: this viewer's step is 0 to 47"),
        ({"cell": -2}, "cell=-2: this viewer's cell is -1 to 255"),
        ({"view": "table"}, "view='table': the viewer has grid, text"),
        ({"colour": "kl"}, "colour='kl' needs the logits"),
        ({"token": ""}, "token='': the viewer has argmax, current"),
    ],
)
def test_traitlets_refuse_what_it_has_not(change: dict, says: str) -> None:
    viewer = CanvasViewer(random_canvas())
    (name, value) = next(iter(change.items()))
    before = getattr(viewer, name)
    with pytest.raises(LabError, match=re.escape(says)):
        setattr(viewer, name, value)
    assert getattr(viewer, name) == before
    with pytest.raises(LabError, match=re.escape(says)):
        CanvasViewer(random_canvas(), **change)


def test_runs_that_cannot_be_shown_are_refused() -> None:
    good = random_canvas(steps=3)
    nan = good.entropy.copy()
    nan[1, 7] = np.nan
    cases = [
        ({"trace": good, "other": random_canvas(length=32)}, "canvases of 256 and 32 positions"),
        ({"trace": good, "labels": ["a", "b"]}, "2 labels for 1 runs"),
        ({"trace": good, "decode": ["only"]}, "decode has no text for token"),
        ({"trace": good, "decode": lambda token: token}, "decode gave int for token"),
        ({"trace": dataclasses.replace(good, entropy=nan)}, "not finite at step 1, position 7"),
        ({"trace": dataclasses.replace(good, accepted=good.accepted[:2])}, r"accepted has shape \(2, 256\)"),
        ({"trace": dataclasses.replace(good, stable=good.stable[:2])}, r"stable has shape \(2,\) for 3 steps"),
        ({"trace": dataclasses.replace(good, argmax=good.argmax - 1000)}, "negative token id"),
        ({"trace": dataclasses.replace(good, current=good.current[:0])}, "neither 0"),
    ]
    for arguments, says in cases:
        with pytest.raises(LabError, match=says) as refused:
            CanvasViewer(**arguments)
        assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_infinite_kl_is_refused_with_the_way_out() -> None:
    trace = random_canvas(steps=2, length=4, vocab_size=5, keep_logits=True)
    trace.logits[1, 0, 0] = -np.inf
    with pytest.raises(LabError, match=r"logits=None"):
        CanvasViewer(trace)
    CanvasViewer(dataclasses.replace(trace, logits=None))


def test_the_explorable_refuses_what_it_cannot_compute() -> None:
    for ramp, bound, says in (
        (ConfidenceRamp(pull=2.0), 0.1, "pull=2.0: the explorable knows ramps that ignore the canvas"),
        (ConfidenceRamp(growth=9.0), 0.1, "growth=9.0: the explorable's slider goes from 0.25 to 8.0"),
        (ConfidenceRamp(), 0.0, "entropy_bound=0.0: the explorable's slider goes from 0.001 to 100.0"),
    ):
        with pytest.raises(LabError, match=re.escape(says)):
            entropy_bound_explorable(ramp, entropy_bound=bound)
