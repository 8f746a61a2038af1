"""The canvas viewer in headless Chromium: what Python packed is what a reader sees, by hand, by keyboard and by ear."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from canvases import accept_states, random_canvas, scale_error
from looks import contrasts, sticking_out

from dglab_utils.report.canvas_payload import pack
from dglab_utils.report.viewer import CanvasViewer, standalone_html
from dglab_utils.sampling.ramp import ConfidenceRamp, run_ramp
from dglab_utils.sampling.trace import CanvasTrace

WORDS = [" the", " canvas", ",", " is", "ing", "\n", " ", " read", "\t", " noise"]
UNPACK = """async (payload) => {
    const run = await dglabCanvas.unpack(payload);
    const plain = (value) => (value instanceof Map || ArrayBuffer.isView(value) ? [...value] : value);
    return JSON.stringify(run, (_, value) => plain(value));
}"""
CELLS = "[...document.querySelectorAll('[role=gridcell]')]"

Open = Callable[..., Any]


def word(token: int) -> str:
    return WORDS[token % len(WORDS)]


def unpacked(open_page: Open, payload: str) -> dict[str, Any]:
    """The run as the script reads it, brought over as one string: playwright takes its time over arrays."""
    return json.loads(open_page(standalone_html("")).evaluate(UNPACK, payload))


def show(open_page: Open, *traces: CanvasTrace, decode: Any = word, labels: Any = (), **how: Any) -> Any:
    """A page with the viewer, once it is there."""
    page = open_page(standalone_html(CanvasViewer(*traces, decode=decode, labels=labels).html()), **how)
    page.wait_for_selector("[role=gridcell]")
    return page


def set_state(page: Any, **state: Any) -> None:
    page.evaluate("(state) => document.querySelector('.dglab-canvas').dglab.set(state)", state)


def state(page: Any) -> dict[str, Any]:
    return page.evaluate("document.querySelector('.dglab-canvas').dglab.state")


def cells(page: Any, what: str) -> list[Any]:
    return page.evaluate(f"{CELLS}.map((cell) => {what})")


# -- what is packed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"vocab_size": 262_144},
        {"vocab_size": 2, "steps": 3},
        {"length": 32, "steps": 1},
        {"length": 63, "steps": 7, "vocab_size": 300},
        {"length": 64, "steps": 9, "vocab_size": 50, "keep_logits": True},
        {"length": 1, "steps": 2},
        {"length": 1024, "steps": 80, "vocab_size": 262_144},  # more than 65,536 tokens: ranks of three bytes
    ],
    ids=str,
)
def test_a_run_comes_back_cell_by_cell(open_page: Open, shape: dict) -> None:
    trace = random_canvas(**shape)
    run = unpacked(open_page, pack(trace, decode=word, label="λ"))

    def grid(name: str) -> np.ndarray:
        return np.array(run[name]).reshape(trace.steps, trace.canvas_length)

    for name in ("argmax", "current", "accepted"):
        np.testing.assert_array_equal(grid(name), getattr(trace, name))
    assert (np.abs(grid("entropy") - trace.entropy) <= scale_error(trace.entropy, 255)).all()
    assert (run["kl"] is None) == (trace.logits is None)
    if trace.logits is not None:
        assert (np.abs(grid("kl") - trace.kl_to_final) <= scale_error(trace.kl_to_final, 255)).all()
    assert dict(run["text"]) == {int(i): word(i) for i in np.union1d(trace.argmax, trace.current)}
    np.testing.assert_allclose(run["meanEntropy"], trace.mean_entropy, rtol=1e-4)
    np.testing.assert_allclose(run["temperature"], trace.temperature, rtol=1e-4)
    assert (run["stable"], run["confident"]) == (trace.stable.tolist(), trace.confident.tolist())
    assert (run["stopped"], run["label"]) == (True, "λ")


@pytest.mark.parametrize("budget", range(94_000, 40_000, -9_000))
def test_what_a_budget_leaves_is_exact(open_page: Open, budget: int) -> None:
    trace = random_canvas(vocab_size=4000, keep_logits=False)
    run = unpacked(open_page, pack(trace, word, budget))
    np.testing.assert_array_equal(np.array(run["argmax"]), trace.argmax.ravel())
    np.testing.assert_array_equal(np.array(run["accepted"]), trace.accepted.ravel())
    error = np.abs(np.array(run["entropy"]) - trace.entropy.ravel())
    assert (error <= scale_error(trace.entropy, run["levels"]).ravel()).all()
    kept = np.concatenate([np.zeros_like(trace.accepted[:1]), trace.accepted[:-1]])
    there = {"all": np.ones_like(kept), "kept": kept, "none": np.zeros_like(kept)}[run["currentKept"]]
    np.testing.assert_array_equal(np.array(run["current"]), np.where(there, trace.current, -1).ravel())
    assert all(text == word(token) for token, text in run["text"])


def test_a_damaged_payload_leaves_the_readable_text(open_page: Open) -> None:
    html = CanvasViewer(random_canvas(steps=2)).html()
    page = open_page(standalone_html(re.sub('data-run="[^"]{40}', 'data-run="' + "A" * 36, html)))
    page.wait_for_selector("text=could not start here")
    assert page.locator("pre").inner_text().split()[0] == str(random_canvas(steps=2).argmax[-1, 0])


def test_without_scripts_the_final_text_is_there(open_page: Open) -> None:
    trace = random_canvas(steps=2)
    page = open_page(standalone_html(CanvasViewer(trace, decode=word).html()), javascript=False)
    assert page.locator("pre").text_content() == "".join(word(token) for token in trace.argmax[-1])


# -- what is shown -------------------------------------------------------------------------------------------------


def test_every_step_shows_its_states_and_tokens(open_page: Open) -> None:
    trace = random_canvas(steps=6, length=64)
    page = show(open_page, trace, decode=None)
    states = accept_states(trace)
    assert set(states.ravel()) == {"first", "again", "dropped", "open"}
    for step in range(trace.steps):
        for token in ("argmax", "current"):
            set_state(page, step=step, token=token)
            assert cells(page, "cell.dataset.state") == states[step].tolist()
            assert cells(page, "Number(cell.textContent)") == getattr(trace, token)[step].tolist()
        random = ~trace.accepted[step - 1] if step else np.ones(64, dtype=bool)
        assert cells(page, "cell.hasAttribute('data-noise')") == random.tolist()
        line = page.locator(".dg-run > dl").inner_text()
        assert f"{step + 1} of 6" in line and f"{trace.commits_per_step[step]} of 64" in line
        assert f"{trace.temperature[step]:.2f}" in line and f"{trace.mean_entropy[step]:.2f} nats" in line


@pytest.mark.parametrize(("length", "columns"), [(256, 16), (64, 8), (32, 8), (1, 1), (63, 9), (251, 16)])
def test_the_grid_is_nearly_square(open_page: Open, length: int, columns: int) -> None:
    page = show(open_page, random_canvas(steps=2, length=length))
    assert page.locator("[role=row]").first.locator("[role=gridcell]").count() == columns
    assert page.locator("[role=gridcell]").count() == length


@pytest.mark.parametrize("colour", ["entropy", "kl"])
def test_a_value_has_its_share_of_the_scale(open_page: Open, colour: str) -> None:
    trace = random_canvas(steps=5, length=32, vocab_size=50, keep_logits=True)
    values = trace.entropy if colour == "entropy" else trace.kl_to_final
    page = show(open_page, trace)
    page.get_by_label({"entropy": "entropy", "kl": "KL to final"}[colour], exact=True).check(force=True)
    set_state(page, step=2)
    shares = np.array(cells(page, "Number(cell.style.getPropertyValue('--dg-share'))"))
    np.testing.assert_allclose(shares, np.sqrt(values[2] / values.max()), atol=0.004)
    assert f"{values.max():.2f}" in page.locator(".dg-legend").inner_text()
    assert "nats" in page.locator(".dg-legend").inner_text()


def test_kl_is_offered_only_where_logits_were_kept(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=3, length=32, vocab_size=50))
    assert page.get_by_text("KL to final").count() == 0


HOSTILE = [
    "<img src=x onerror='window.hurt=1'>",
    "</script><script>window.hurt=1</script>",
    '"><b>',
    "&lt;",
    "\u202eabc",
    "\0",
    "",
    "\u200b",
]


def test_token_text_is_data(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=3, length=8, vocab_size=8), decode=HOSTILE, labels=[HOSTILE[0]])
    visible = ["<img␣src=x␣onerror='window.hurt=1'>", *HOSTILE[1:4], "‹202e›abc", "␀", "∅", "‹200b›"]
    ids = random_canvas(steps=3, length=8, vocab_size=8).argmax[0]
    assert cells(page, "cell.textContent") == [visible[i] for i in ids]
    set_state(page, view="text", cell=0)
    page.locator("[role=gridcell]").first.hover()
    assert page.evaluate("window.hurt") is None
    assert page.locator(".dglab :is(img, script, b)").count() == 0
    assert page.locator("h4").inner_text() == HOSTILE[0]


def test_text_reads_as_text(open_page: Open) -> None:
    trace = random_canvas(steps=2, length=32, vocab_size=len(WORDS))
    page = show(open_page, trace)
    page.get_by_label("text", exact=True).check(force=True)
    seen = {"\n": "⏎\n", " ": "␣", "\t": "⇥"}
    assert "".join(cells(page, "cell.textContent")) == "".join(seen.get(word(t), word(t)) for t in trace.argmax[0])
    heights = {
        box["height"] for box in page.evaluate(f"{CELLS}.slice(0, 4).map((c) => c.getBoundingClientRect().toJSON())")
    }
    assert max(heights) < 60


def test_two_runs_go_in_step_and_the_shorter_waits(open_page: Open) -> None:
    short, long = random_canvas(steps=4, length=32), random_canvas(steps=9, length=32, seed=1)
    page = show(open_page, short, long, labels=["one", "other"], decode=None)
    for step in range(9):
        set_state(page, step=step)
        tokens = cells(page, "Number(cell.textContent)")
        assert tokens[:32] == short.argmax[min(step, 3)].tolist()
        assert tokens[32:] == long.argmax[step].tolist()
        assert ["done" in text for text in page.locator(".dg-done").all_inner_texts()] == [step >= 3, step == 8]
    page.locator("[role=gridcell]").nth(40).hover()
    shown = page.locator(".dg-detail dl").all_inner_texts()
    for run, text in zip((short, long), shown, strict=True):
        assert re.search(rf"\b{run.argmax[-1, 8]}\b", text)


def test_a_page_opens_at_the_state_that_was_saved(open_page: Open) -> None:
    viewer = CanvasViewer(
        random_canvas(steps=6, length=32), decode=word, step=4, cell=7, colour="entropy", token="current"
    )
    page = open_page(standalone_html(viewer.html()))
    page.wait_for_selector("[role=gridcell]")
    assert state(page) == {"step": 4, "cell": 7, "view": "grid", "colour": "entropy", "token": "current"}
    assert page.locator("[role=gridcell]").nth(7).get_attribute("class") == "dg-cell dg-chosen"


# -- by hand -------------------------------------------------------------------------------------------------------


def test_pointing_at_a_cell_tells_all_of_it(open_page: Open) -> None:
    trace = random_canvas(steps=4, length=64, vocab_size=50, keep_logits=True)
    page = show(open_page, trace)
    set_state(page, step=3)
    at = int(np.flatnonzero(trace.accepted[2] & trace.accepted[3])[0])
    page.locator("[role=gridcell]").nth(at).hover()
    said = page.locator(".dg-detail").inner_text()
    for text in (f"id {trace.argmax[3, at]}", f"id {trace.current[3, at]}", "from the step before", "accepted again"):
        assert text in said
    for value in (trace.entropy[3, at], 0.0):
        assert re.search(rf"\b{value:.1f}".rstrip("0").rstrip("."), said)
    assert f"first at step {trace.first_accept[at] + 1}" in said
    page.mouse.move(1, 1)
    assert "Point at a cell" in page.locator(".dg-detail").inner_text()
    page.locator("[role=gridcell]").nth(at).click()
    page.mouse.move(1, 1)
    assert state(page)["cell"] == at
    assert page.locator(".dg-detail").inner_text() == said


def test_buttons_scrubber_and_curve_set_the_step(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=11, length=32))
    assert page.get_by_label("One step back").is_disabled()
    page.get_by_label("One step on").click()
    page.get_by_label("One step on").click()
    page.get_by_label("One step back").click()
    assert state(page)["step"] == 1
    page.get_by_label("Denoising step").fill("7")
    assert state(page)["step"] == 7
    box = page.locator(".dg-spark").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + 10)
    assert state(page)["step"] == 4
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 3, box["y"])
    page.mouse.up()
    assert state(page)["step"] == 10
    assert page.get_by_label("One step on").is_disabled()


def test_playing_runs_to_the_end_and_starts_again(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=5, length=32))
    set_state(page, step=2)
    page.get_by_label("Play").click()
    page.get_by_label("Pause").wait_for()
    page.get_by_label("Play").wait_for()
    assert state(page)["step"] == 4
    page.get_by_label("Play").click()
    page.wait_for_function("document.querySelector('.dglab-canvas').dglab.state.step === 1")
    page.get_by_label("Pause").click()
    stopped = state(page)["step"]
    page.wait_for_timeout(500)
    assert state(page)["step"] == stopped < 4


# -- by keyboard and by ear ----------------------------------------------------------------------------------------


def test_keys_step_and_play(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=6, length=32))

    def after(key: str) -> int:
        page.keyboard.press(key)
        return state(page)["step"]

    page.get_by_label("Play").focus()
    assert [after(key) for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home")] == [1, 2, 1, 5, 0]
    page.get_by_label("Denoising step").focus()
    assert [after(key) for key in ("ArrowRight", "End", "Home", ".", ".", ",")] == [1, 5, 0, 1, 2, 1]
    page.keyboard.press(" ")
    page.get_by_label("Pause").wait_for()
    page.keyboard.press(" ")
    page.get_by_label("Play").wait_for()


def test_the_grid_is_one_stop_and_arrows_move_in_it(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=6, length=32))  # 4 rows of 8
    assert page.locator("[role=gridcell][tabindex='0']").count() == 1
    page.locator("[role=gridcell]").first.focus()

    def after(key: str) -> tuple[int, int]:
        page.keyboard.press(key)
        focused = page.evaluate("Number(document.activeElement.dataset.at)")
        return focused, state(page)["cell"]

    keys = {"ArrowRight": 1, "ArrowDown": 9, "End": 15, "ArrowLeft": 14, "ArrowUp": 6, "Home": 0, "ArrowLeft ": 0}
    assert [after(key.strip()) for key in keys] == [(at, at) for at in keys.values()]
    assert [after(key) for key in ("Control+End", "ArrowDown", "Control+Home")] == [(31, 31), (31, 31), (0, 0)]
    after(".")
    assert (state(page)["step"], state(page)["cell"]) == (1, 0)
    page.keyboard.press(" ")
    page.get_by_label("Pause").wait_for()
    assert page.locator("[role=gridcell][tabindex='0']").count() == 1


def test_everything_has_a_name_and_cells_say_what_they_are(open_page: Open) -> None:
    trace = random_canvas(steps=3, length=32)
    page = show(open_page, trace)
    tree = page.locator(".dglab").aria_snapshot()
    names = [
        'group "Canvas viewer"',
        'button "Play"',
        'slider "Denoising step"',
        'radio "best guess"',
        'grid "Canvas, 32',
    ]
    for name in names:
        assert name in tree, tree[:2000]
    set_state(page, step=1)
    words = {"first": "accepted for the first time", "again": "accepted again", "dropped": "no longer accepted"}
    for at, label in enumerate(cells(page, "cell.getAttribute('aria-label')")):
        assert label.startswith(f"position {at}: ")
        assert label.endswith(words.get(accept_states(trace)[1, at], "not accepted"))
    spoken = page.get_by_label("Denoising step").get_attribute("aria-valuetext")
    assert spoken.startswith(f"step 2 of 3, {trace.commits_per_step[1]} of 32 accepted")


def test_the_live_region_is_silent_while_playing(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=8, length=32))
    live = page.locator("[aria-live=polite]")
    page.wait_for_function("document.querySelector('[aria-live]').textContent.startsWith('step 1 of 8')")
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.querySelector('[aria-live]').textContent))"
        ".observe(document.querySelector('[aria-live]'), { childList: true, characterData: true, subtree: true })"
    )
    page.get_by_label("Play").click()
    page.wait_for_function("document.querySelector('.dglab-canvas').dglab.state.step === 6")
    assert page.evaluate("said") == []
    page.wait_for_function("said.length > 0")
    assert page.evaluate("said.length") == 1 and live.text_content().startswith("step 8 of 8")


def test_reduced_motion_means_no_transitions_and_nothing_plays_itself(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=5, length=32), motion="reduce")
    assert set(cells(page, "getComputedStyle(cell).transitionDuration")) == {"0s"}
    page.wait_for_timeout(600)
    assert state(page)["step"] == 0
    page.get_by_label("Play").click()
    page.wait_for_function("document.querySelector('.dglab-canvas').dglab.state.step > 0")


# -- in the light, in the dark, on a phone -------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_in_every_state_and_colouring(open_page: Open, theme: str) -> None:
    page = show(open_page, random_canvas(steps=5, vocab_size=50, keep_logits=True), theme=theme, motion="reduce")
    for colour in ("accept", "entropy", "kl"):
        for token, view in (("argmax", "grid"), ("current", "text")):
            set_state(page, step=3, colour=colour, token=token, view=view, cell=3)
            measured = contrasts(page)
            assert len(measured) > 256
            assert min(measured)[0] >= 4.5, (colour, min(measured))


def test_states_differ_by_more_than_colour(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=5), motion="reduce")
    set_state(page, step=3)
    marks = """(name) => {
        const cell = document.querySelector(`[role=gridcell][data-state=${name}]`);
        const drawn = (part) => getComputedStyle(cell, part).content !== "none";
        return [drawn("::before"), drawn("::after"), getComputedStyle(cell).outlineStyle];
    }"""
    for colour in ("accept", "entropy"):
        set_state(page, colour=colour)
        seen = {name: tuple(page.evaluate(marks, name)) for name in ("first", "again", "dropped", "open")}
        assert len(set(seen.values())) == 4, seen


def test_the_page_around_it_decides_the_theme(open_page: Open) -> None:
    page = show(open_page, random_canvas(steps=2, length=32))
    surface = "getComputedStyle(document.querySelector('.dglab')).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 24, 30)"
    assert page.evaluate(surface) == light
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert page.evaluate(surface) == dark
    page.evaluate("delete document.documentElement.dataset.theme; document.body.dataset.jpThemeLight = 'false'")
    assert page.evaluate(surface) == dark
    page.emulate_media(color_scheme="dark")
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert page.evaluate(surface) == light
    page.evaluate("delete document.body.dataset.jpThemeLight")
    assert page.evaluate(surface) == dark


@pytest.mark.parametrize("runs", [1, 2])
def test_a_phone_shows_it_without_scrolling_sideways(open_page: Open, runs: int) -> None:
    traces = [random_canvas(steps=4, vocab_size=50, seed=seed) for seed in range(runs)]
    page = show(open_page, *traces, width=360)
    live = page.locator("[aria-live]").first
    live.evaluate("(node) => node.textContent = 'what is said to those who listen is long '.repeat(9)")
    for view in ("grid", "text"):
        set_state(page, view=view, cell=17)
        assert sticking_out(page, 360) == []
    set_state(page, view="grid")
    sizes = page.evaluate(f"{CELLS}.map((c) => c.getBoundingClientRect().width)")
    assert min(sizes) >= 16


def test_the_model_s_own_canvas_is_drawn(open_page: Open) -> None:
    """A real run of the official sampler, not a random one: what it ends with is what the page ends with."""
    trace = run_ramp(ConfidenceRamp(growth=2.0))
    page = show(open_page, trace, decode=None)
    set_state(page, step=trace.steps - 1)
    assert cells(page, "Number(cell.textContent)") == trace.output.tolist()
    assert page.locator(".dg-done").inner_text() == "done: the stop test fired"
