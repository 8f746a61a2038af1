"""The cost explorer: its arithmetic against the Python model, and its page."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from looks import contrasts, sticking_out

from dglab_utils.measure.costs import COMPONENTS, ENGINE, OFFICIAL, PRECISIONS, Efficiency, Hardware, ModelShape
from dglab_utils.measure.costs_serving import Comparison, Drafts, Load, Setup, compare
from dglab_utils.report.cost_explorer import START, cost_explorer
from dglab_utils.report.reference import reference
from dglab_utils.report.viewer import standalone_html

SHAPE = ModelShape.from_mapping("real", reference("model_shapes")["diffusiongemma-26B-A4B"])
CARDS = {name: Hardware.from_mapping(name, figures) for name, figures in reference("hardware").items()}
EFFICIENCY = Efficiency(0.9, 0.7, 1.2e-4)

Open = Callable[..., Any]


def explorer(**start: Any) -> str:
    return cost_explorer(
        SHAPE,
        list(CARDS.values()),
        list(PRECISIONS.values()),
        software=ENGINE,
        efficiency=EFFICIENCY,
        start=START | start,
    ).data


def show(open_page: Open, start: dict[str, Any] | None = None, **how: Any) -> Any:
    return open_page(standalone_html(explorer(**(start or {})), "cost_explorer.js"), **how)


def numbers(found: Comparison) -> dict[str, Any]:
    """What the script's `compare` returns, from Python's."""

    def serving(name: str) -> dict[str, float]:
        way = getattr(found, name)
        flat = {key: getattr(way, key) for key in ("prefill", "first", "total", "rate", "memory", "fits")}
        steps = {f"step {c}": way.step.by_component[c] for c in COMPONENTS}
        return flat | steps | {"overhead": way.step.overhead, "step": way.step.total}

    both = {f"{name} {key}": v for name in ("diffusion", "autoregressive") for key, v in serving(name).items()}
    return both | {"speedup": found.speedup, "break even": found.break_even}


SCRIPT = """(cases) => cases.map(([shape, load, setup, drafts]) => {
    const found = dglabCostExplorer.compare(shape, load, setup, drafts);
    const flat = { speedup: found.speedup, "break even": found.breakEven };
    for (const name of ["diffusion", "autoregressive"]) {
        const way = found[name];
        for (const key of ["prefill", "first", "total", "rate", "memory", "fits"]) flat[`${name} ${key}`] = way[key];
        for (const [c, v] of Object.entries(way.step.byComponent)) flat[`${name} step ${c}`] = v;
        flat[`${name} overhead`] = way.step.overhead;
        flat[`${name} step`] = way.step.total;
    }
    return flat;
})"""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_script_s_numbers_are_python_s(open_page: Open, precision: str) -> None:
    """Every number the page can show, to 1e-6, over cards, loads, software and drafts."""
    cases = [
        (Load(batch, prompt, output, steps), Setup(CARDS[card], PRECISIONS[precision], EFFICIENCY, software), drafts)
        for card, batch, (prompt, output), steps, software, drafts in itertools.product(
            ("H100 SXM", "RTX 4090", "L4"),
            (1, 7, 200),
            ((64, 1), (1000, 256), (1024, 257), (100_000, 3000)),
            (1, 12, 48),
            (ENGINE, OFFICIAL),
            (None, Drafts(4, 0.8)),
        )
    ]
    page = open_page(standalone_html("", "cost_explorer.js"))
    given = [
        [asdict(SHAPE), asdict(load), asdict(setup), asdict(drafts) if drafts else None]
        for load, setup, drafts in cases[::7]
    ]
    evens = set()
    for (load, setup, drafts), ours in zip(cases[::7], page.evaluate(SCRIPT, given), strict=True):
        expected = numbers(compare(SHAPE, load, setup, drafts))
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert ours[name] == (None if value is None else pytest.approx(value, rel=1e-6)), (name, load)
        evens.add(expected["break even"])
    assert len(given) > 40 and len(evens) > 3 and None in evens


ANSWERS = [
    ({"batch": 1}, "DiffusionGemma: "),
    ({"batch": 16, "steps": 48}, "Gemma 4: "),
    ({"batch": 64}, "Gemma 4: for 64 requests at once DiffusionGemma needs"),
    ({"batch": 256}, "Neither: 256 requests at once do not fit"),
    ({"hardware": "L4", "precision": "bf16"}, "Neither: in bf16 the weights are 50.5 GB, and 21.6 GB of L4"),
]


@pytest.mark.parametrize(("start", "begins"), ANSWERS)
def test_it_answers_in_a_sentence(open_page: Open, start: dict[str, Any], begins: str) -> None:
    page = show(open_page, start)
    says = page.locator(".dg-says").inner_text()
    assert says.startswith(begins), says
    chosen = START | start
    found = compare(
        SHAPE,
        Load(chosen["batch"], chosen["prompt"], chosen["output"], chosen["steps"]),
        Setup(CARDS[chosen["hardware"]], PRECISIONS[chosen["precision"]], EFFICIENCY),
    )
    if says.startswith("DiffusionGemma: "):
        assert f"{float(f'{found.speedup:.2g}'):g} times" in says
    elif " times the " in says:
        assert f"{float(f'{1 / found.speedup:.2g}'):g} times" in says and f"pays below {found.break_even} " in says
    fits = [int(cell) if cell != "none" else 0 for cell in cells(page, "most requests that fit")]
    assert fits == [found.diffusion.fits, found.autoregressive.fits]


def cells(page: Any, row: str) -> list[str]:
    return page.locator(".dg-table tr", has_text=row).first.locator("td").all_inner_texts()


def test_every_control_moves_the_answer(open_page: Open) -> None:
    page = show(open_page, {"batch": 4})

    def rates() -> list[float]:
        return [float(cell.replace(",", "")) for cell in cells(page, "tokens a second, all requests")]

    def slide(name: str, steps: int) -> None:
        page.get_by_label(name, exact=True).focus()
        for _ in range(abs(steps)):
            page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")

    seen = [rates()]
    for move in (
        lambda: page.get_by_label("card", exact=True).select_option("H200 SXM"),
        lambda: page.get_by_label("weights", exact=True).select_option("bf16"),
        lambda: slide("requests at once", 2),
        lambda: slide("tokens in", 3),
        lambda: slide("tokens out", -1),
        lambda: slide("denoising steps a canvas", -2),
        lambda: page.get_by_label("Gemma 4 predicts 4 tokens ahead").check(),
        lambda: slide("drafts accepted", -3),
    ):
        move()
        seen.append(rates())
        assert seen[-1] != seen[-2], move
    assert page.get_by_label("requests at once", exact=True).get_attribute("aria-valuetext") == "8"
    found = compare(
        SHAPE,
        Load(8, 8192, 512, 12),
        Setup(CARDS["H200 SXM"], PRECISIONS["bf16"], EFFICIENCY),
        Drafts(4, 0.5),
    )
    assert seen[-1] == pytest.approx([found.diffusion.rate, found.autoregressive.rate], rel=5e-3)
    step = float(cells(page, "all (Gemma 4: a round")[0].split()[0].replace(",", ""))
    assert step == pytest.approx(1e3 * found.diffusion.step.total, rel=5e-3)
    page.wait_for_function(
        "document.querySelector('[aria-live]').textContent === document.querySelector('.dg-says').textContent"
    )


def test_a_card_of_one_s_own(open_page: Open) -> None:
    page = show(open_page)
    fields = [page.get_by_label(name) for name in ("bandwidth, GB/s", "bf16 peak, TFLOP/s", "memory, GB")]
    assert not any(field.is_visible() for field in fields)
    page.get_by_label("card", exact=True).select_option("my own card")
    for field, value in zip(fields, ("1008", "165", "24"), strict=True):
        field.fill(value)
    own = cells(page, "first text after")
    page.get_by_label("card", exact=True).select_option("RTX 4090")
    assert cells(page, "first text after") == own
    page.get_by_label("card", exact=True).select_option("my own card")
    fields[0].fill("-3")
    assert page.locator(".dg-says").inner_text() == "Bandwidth, peak and memory must be positive numbers."
    assert fields[0].get_attribute("aria-invalid") == "true"
    fields[0].fill("2000")
    assert "must be" not in page.locator(".dg-says").inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_it_is_legible_and_fits(open_page: Open, theme: str, width: int) -> None:
    page = show(open_page, width=width, theme=theme)
    page.get_by_label("card", exact=True).select_option("my own card")
    page.get_by_label("Gemma 4 predicts 4 tokens ahead").check()
    measured = contrasts(page)
    assert len(measured) > 30 and min(measured)[0] >= 4.5
    assert sticking_out(page, width) == []
    tree = page.locator(".dglab").aria_snapshot()
    for name in (
        'combobox "card"',
        'combobox "weights"',
        'spinbutton "memory, GB"',
        'slider "requests at once"',
        'slider "tokens in"',
        'slider "denoising steps a canvas"',
        'checkbox "Gemma 4 predicts 4 tokens ahead"',
        'slider "drafts accepted"',
        "img",
        'table "At this load"',
    ):
        assert name in tree, tree


def test_without_scripts_it_says_what_is_missing(open_page: Open) -> None:
    page = show(open_page, javascript=False)
    assert "needs the book's page with scripts on" in page.locator("body").inner_text()


def test_the_output_holds_no_markup_of_its_data() -> None:
    """Names are data: a card called like a tag stays text."""
    odd = Hardware('<b>"x"</b>', 1e12, 1e14, 1e11)
    page = cost_explorer(
        SHAPE,
        [odd],
        [PRECISIONS["fp8"]],
        software=ENGINE,
        efficiency=EFFICIENCY,
        start=START | {"hardware": odd.name},
    ).data
    assert "<b>" not in page
    content = json.loads(html.unescape(re.search('data-model="([^"]*)"', page).group(1)))
    assert content["hardware"][0]["name"] == odd.name
