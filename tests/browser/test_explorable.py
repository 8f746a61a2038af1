"""The entropy-bound explorable: its arithmetic against the official sampler, and its page."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from looks import contrasts, sticking_out
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
)

from dglab_utils.report.explorable import entropy_bound_explorable
from dglab_utils.report.viewer import standalone_html
from dglab_utils.sampling.ramp import ConfidenceRamp, run_ramp

GROWTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)

Open = Callable[..., Any]


def content(ramp: ConfidenceRamp, **changes: Any) -> dict[str, Any]:
    """What the page gets, out of the page."""
    page = entropy_bound_explorable(ramp).data
    return json.loads(html.unescape(re.search('data-ramp="([^"]*)"', page).group(1))) | changes


def rule(page: Any, ramp: dict[str, Any], growth: float, bound: float) -> list[dict[str, Any]]:
    return page.evaluate(
        "([ramp, growth, bound]) => dglabEntropyBound.rule(ramp, growth, bound)", [ramp, growth, bound]
    )


@pytest.fixture
def script(open_page: Open) -> Any:
    return open_page(standalone_html("", "entropy_bound.js"))


@pytest.mark.parametrize("growth", GROWTHS)
def test_masks_are_the_official_sampler_s_in_double_precision(script: Any, growth: float) -> None:
    """All 48 steps, whatever the stop test says. In double precision only exact ties are left open: torch.sort does not
    say which of several equal entropies comes first, so there the number accepted is compared, and that the
    positions which differ all have one entropy.
    """
    ramp = ConfidenceRamp(growth=growth)
    schedule = LinearTemperatureScheduleLogitsProcessor(t_min=0.4, t_max=0.8, max_denoising_steps=48)
    canvas = torch.zeros(1, 256, dtype=torch.long)
    compared = 0
    for bound in BOUNDS:
        sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), 256, 1000, 48)
        steps = rule(script, content(ramp, threshold=0.0), growth, bound)
        assert len(steps) == 48
        for elapsed, step in enumerate(steps):
            logits = torch.zeros(256, 1000, dtype=torch.float64)
            margin = (growth * elapsed - 8 * ramp.difficulty.double()).clamp(min=0)
            logits.scatter_(1, ramp.targets[:, None], margin[:, None])
            sampler.accept_canvas(canvas, canvas, schedule(None, logits[None], cur_step=48 - elapsed), 48 - elapsed)
            official, ours = sampler.accepted_token_mask[0].numpy(), np.array(step["accepted"], dtype=bool)
            entropy = np.array(step["entropy"])
            where = f"bound {bound}, elapsed {elapsed}"
            assert official.sum() == ours.sum() == step["count"], where
            assert len(np.unique(entropy[official != ours])) <= 1, where
            compared += 1
    assert compared == 48 * len(BOUNDS)


def test_runs_are_the_notebook_s_in_single_precision(script: Any) -> None:
    """What a notebook measures is in single precision, where an entropy is off by up to 1e-5 nats. A sum of them may
    then land on the other side of the bound, or two positions change places: seldom, and never more than two.
    """
    steps = near = 0
    for growth, bound in itertools.product(GROWTHS, (0.001, 0.1, 10.0)):
        ramp = ConfidenceRamp(growth=growth)
        trace = run_ramp(ramp, entropy_bound=bound)
        ours = rule(script, content(ramp), growth, bound)
        assert (len(ours), ours[-1]["stopped"]) == (trace.steps, trace.stopped)
        np.testing.assert_allclose([step["temperature"] for step in ours], trace.temperature, rtol=1e-6)
        np.testing.assert_allclose([step["mean"] for step in ours], trace.mean_entropy, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose([step["entropy"] for step in ours], trace.entropy, rtol=1e-5, atol=1e-5)
        accepted = np.array([step["accepted"] for step in ours], dtype=bool)
        tied = trace.entropy > np.log(1000) - 1e-5
        differ = ((accepted != trace.accepted) & ~tied).sum(axis=1)
        assert max(differ.max(), np.abs((accepted & tied).sum(1) - (trace.accepted & tied).sum(1)).max()) <= 2
        steps += trace.steps
        near += int((differ > 0).sum())
    assert near <= 0.03 * steps


@pytest.mark.parametrize("growth", [0.25, 1.0, 4.0])
def test_the_stop_test_waits_for_a_stable_argmax(script: Any, growth: float) -> None:
    """With a threshold above ln(vocabulary) every step is confident, so that stability alone decides."""
    ramp = ConfidenceRamp(growth=growth)
    trace = run_ramp(ramp, confidence_threshold=7.0)
    ours = rule(script, content(ramp, threshold=7.0), growth, 0.1)
    assert (len(ours), ours[-1]["stopped"]) == (trace.steps, trace.stopped)
    assert trace.steps > 2


@pytest.mark.parametrize(("growth", "steps"), [(0.5, 31), (1.0, 18), (2.0, 10), (4.0, 6)])
def test_it_says_the_first_lab_s_steps(open_page: Open, growth: float, steps: int) -> None:
    page = open_page(standalone_html(entropy_bound_explorable(ConfidenceRamp(growth=growth)).data, "entropy_bound.js"))
    assert page.locator(".dg-says").inner_text().endswith(f"stops after {steps} steps.")
    assert page.get_by_label("step", exact=True).get_attribute("max") == str(steps)


def show(open_page: Open, **how: Any) -> Any:
    return open_page(standalone_html(entropy_bound_explorable(ConfidenceRamp()).data, "entropy_bound.js"), **how)


def test_the_sliders_move_everything(open_page: Open) -> None:
    page = show(open_page)
    growth, bound, step = (page.get_by_label(name, exact=True) for name in ("growth", "entropy bound", "step"))
    says = page.locator(".dg-says")

    def accepted() -> int:
        shown = page.locator(".dg-grid .dg-cell:is([data-state=first], [data-state=again])").count()
        assert f"{shown} of 256 are accepted" in says.inner_text()
        assert page.locator(".dg-grid").get_attribute("aria-label").startswith(f"{shown} of 256 positions")
        return shown

    step.fill("13")
    trace = run_ramp(ConfidenceRamp(), entropy_bound=0.1)
    assert accepted() == trace.commits_per_step[12]
    few, inside = accepted(), page.locator(".dg-inside").bounding_box()["width"]
    bound.fill("1")
    assert bound.get_attribute("aria-valuetext") == "10 nats"
    assert accepted() == run_ramp(ConfidenceRamp(), entropy_bound=10.0).commits_per_step[12] > few
    assert page.locator(".dg-inside").bounding_box()["width"] > inside
    growth.fill("3")
    assert growth.get_attribute("aria-valuetext") == "8 logits a step"
    assert "stops after 4 steps" in says.inner_text() and step.input_value() == "4"
    growth.fill("-2")
    assert "all 48 steps pass without a stop" in says.inner_text()
    step.focus()
    page.keyboard.press("Home")
    assert "At step 1," in says.inner_text()
    page.wait_for_function("document.querySelector('[aria-live]').textContent.startsWith('At step 1,')")


def test_the_states_are_those_of_the_rule(open_page: Open) -> None:
    page = show(open_page)
    page.get_by_label("entropy bound", exact=True).fill("1")
    ours = rule(page, content(ConfidenceRamp()), 1.0, 10.0)
    accepted = np.array([step["accepted"] for step in ours], dtype=bool)
    seen = set()
    for at in range(len(ours)):
        page.get_by_label("step", exact=True).fill(str(at + 1))
        before = accepted[at - 1] if at else np.zeros(256, dtype=bool)
        first = accepted[at] & ~accepted[:at].any(axis=0)
        wanted = np.select([first, accepted[at], before], ["first", "again", "dropped"], "open").tolist()
        assert (
            page.evaluate("[...document.querySelectorAll('.dg-grid .dg-cell')].map((c) => c.dataset.state)") == wanted
        )
        seen |= set(wanted)
    assert seen == {"first", "again", "dropped", "open"}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_it_is_legible_and_fits(open_page: Open, theme: str, width: int) -> None:
    page = show(open_page, width=width, theme=theme)
    measured = contrasts(page)
    assert len(measured) > 8 and min(measured)[0] >= 4.5
    assert sticking_out(page, width) == []
    tree = page.locator(".dglab").aria_snapshot()
    for name in ('slider "growth"', 'slider "entropy bound"', 'slider "step"', "img"):
        assert name in tree, tree


def test_without_scripts_it_says_what_is_missing(open_page: Open) -> None:
    page = show(open_page, javascript=False)
    assert "needs the book's page with scripts on" in page.locator("body").inner_text()
