"""Claims, and the verdicts that results give on them.

A claim is something published that can be measured. Its verdict is computed from a `Results`, never written down:

    reproduced          what we measured is what was published, to the digits it was published with
    partly              the figure holds, what it was said to mean does not (or only a part of the figures holds)
    not reproduced      we measured something else
    not measured here   no results of the experiment that would tell

`state` is the machine's word, `measured` what to show beside it, `because` one sentence for the reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dglab_utils.errors import LabError
from dglab_utils.report.reference import reference
from dglab_utils.report.results import Results, everywhere

State = Literal["reproduced", "partly", "not reproduced", "not measured here"]


@dataclass(frozen=True)
class Verdict:
    """What results say of a claim."""

    state: State
    measured: str
    because: str
    host: str = ""


@dataclass(frozen=True)
class Claim:
    """One published statement.

    Attributes:
        id: short name, used in pages.
        text: the statement, in our words.
        source: who published it, where.
        published: the published value, as text.
        experiment: name of the notebook whose results decide.
        judge: those results to a verdict.
    """

    id: str
    text: str
    source: str
    published: str
    experiment: str
    judge: Callable[[Results], Verdict]

    def verdict(self, results: Results | None = None) -> Verdict:
        """The verdict from these results, or from the first that tell (this machine's, then recorded hosts')."""
        if results is None:
            verdicts = [self.verdict(run) for run in everywhere(self.experiment)]
            verdicts.append(Verdict("not measured here", "", f"Run it with: dglab run {self.experiment}"))
            return next((v for v in verdicts if v.state != "not measured here"), verdicts[0])
        try:
            judged = self.judge(results)
        except LabError as missing:  # the run left out what this claim is about
            return Verdict("not measured here", "", str(missing), results.host)
        except (TypeError, ValueError, LookupError) as error:  # it holds what this claim does not know how to read
            why = f"{results.experiment} on {results.host}: {self.id} cannot be read from this run ({error!r})"
            return Verdict("not measured here", "", f"{why}; run the experiment again", results.host)
        return replace(judged, host=results.host)


def _official_cap(results: Results) -> int:
    """The run's cap on steps. Raises LabError unless it is the 48 that the claims speak of."""
    cap, official = results.verdict_input("max_denoising_steps"), reference("released_model")["defaults"]
    if cap != official["max_denoising_steps"]:
        raise LabError(f"this run's cap is {cap} steps, the claim is about {official['max_denoising_steps']}")
    return cap


# -- experiment A: an untrained model ------------------------------------------------------------------------


def _never_stops(results: Results) -> Verdict:
    cap = _official_cap(results)
    steps, accepted = results.find("steps", eos="none"), results.find("accepted_per_step", eos="none")
    stopped, most = results.verdict_input("runs_stopped"), results.verdict_input("most_accepted_in_a_step")
    measured = f"{steps.median:g} of {cap} steps, {accepted.median:.2f} accepted a step ({steps.count} seeds)"
    if stopped == 0 and most == 1:
        return Verdict("reproduced", measured, "Every seed ran to the cap and only the guaranteed token was accepted.")
    return Verdict("not reproduced", measured, "Some canvases stopped before the cap, or more than one was accepted.")


def _entropy_uniform(results: Results) -> Verdict:
    _official_cap(results)
    first, last = results.find("mean_entropy_first", eos="none"), results.find("mean_entropy_last", eos="none")
    uniform = results.verdict_input("uniform_entropy")
    measured = f"{first.median:.2f} falling to {last.median:.2f} nats; ln(vocabulary) is {uniform:.2f}"
    if last.median < 0.98 * uniform:
        return Verdict("not reproduced", measured, "The entropy left the neighbourhood of the uniform bound.")
    if f"{last.median:.2f}" == f"{uniform:.2f}":
        return Verdict("reproduced", measured, "The entropy stayed at the uniform bound.")
    return Verdict(
        "partly",
        measured,
        "It stays close to the bound, and falls a little as the schedule cools the same flat logits.",
    )


def _tokens_per_forward(results: Results) -> Verdict:
    _official_cap(results)
    with_eos, without = results.find("tokens_per_forward", eos="set"), results.find("tokens_per_forward", eos="none")
    accepted = results.find("accepted_per_step", eos="set")
    low, high = results.verdict_input("tokens_per_forward_range")
    measured = (
        f"{low:.2f} to {high:.2f} over {with_eos.count} seeds with an EOS, {without.median:.2f} without one; "
        f"accepted a step: {accepted.median:.2f}"
    )
    published = reference("first_lab")["A_untrained_model"]["tokens_per_forward"]
    if not low <= published <= high:
        return Verdict("not reproduced", measured, "The published value lies outside what the seeds gave.")
    return Verdict(
        "partly",
        measured,
        "The value is one draw of a quantity that counts where an EOS fell, and says nothing of what was accepted.",
    )


def _trained_confidence(results: Results) -> Verdict:
    _official_cap(results)
    accepted = [results.find("accepted_per_step", sharpness=f).median for f in results.verdict_input("sharpness")]
    stopped = results.verdict_input("sharp_runs_stopped")
    measured = (
        f"{min(accepted):.2f} to {max(accepted):.1f} accepted a step by sharpness of the same random weights; "
        f"{stopped} runs stopped before the cap"
    )
    if stopped:
        return Verdict("not reproduced", measured, "Random weights, sharpened, stop early: it took no training.")
    if max(accepted) > 2:
        return Verdict(
            "partly",
            measured,
            "Many tokens a step take confidence, right or wrong, and that takes no training; to stop early the canvas "
            "must agree with itself from step to step, and that no untrained model did.",
        )
    return Verdict("reproduced", measured, "Without training neither many tokens a step nor an early stop was seen.")


# -- experiment B: the confidence ramp -----------------------------------------------------------------------


def _compare(results: Results, name: str, label: str, published: dict[float, float], digits: int) -> tuple[bool, str]:
    """Whether every published value is met to its digits, and the measured ones as text."""
    measured = {key: results.find(name, study="first_lab", **{label: key}).median for key in published}
    met = all(round(measured[key], digits) == value for key, value in published.items())
    return met, ", ".join(f"{label} {key:g}: {value:.{digits}f}" for key, value in measured.items())


def _growth(results: Results) -> Verdict:
    _official_cap(results)
    published = reference("first_lab")["B_commit_waves"]["growth_to_steps"]
    met, measured = _compare(results, "steps", "growth", published, 0)
    if met:
        return Verdict("reproduced", measured, "Steps to the stop follow the growth of confidence, to the step.")
    return Verdict("not reproduced", measured, "The steps differ from the published ones.")


def _accepted(results: Results) -> Verdict:
    _official_cap(results)
    published = reference("first_lab")["B_commit_waves"]["bound_to_mean_accepted"]
    met, measured = _compare(results, "accepted_per_step", "bound", published, 1)
    if met:
        return Verdict("reproduced", measured, "A looser bound accepts more a step, to the printed digit.")
    return Verdict("not reproduced", measured, "The mean accepted differ from the published ones.")


def _speed_knob(results: Results) -> Verdict:
    _official_cap(results)
    published = reference("first_lab")["B_commit_waves"]["bound_to_steps"]
    flat, measured = _compare(results, "steps", "bound", published, 0)
    # Rows of pull, tightest and loosest bound, steps at each; only a comparison of two bounds says anything.
    rows = [r for r in results.verdict_input("steps_by_pull") if r["pull"] > 0 and r["tight"] < r["loose"]]
    if not rows:
        raise LabError(f"{results.experiment} on {results.host}: no pull was tried at two bounds")
    best = max(rows, key=lambda r: r["steps_tight"] - r["steps_loose"])
    measured = (
        f"first lab's ramp: {measured} steps; logits that listen to the canvas (pull {best['pull']:g}): "
        f"{best['steps_tight']:g} steps at {best['tight']:g} nats, {best['steps_loose']:g} at {best['loose']:g}"
    )
    saves = best["steps_loose"] < best["steps_tight"]
    if flat and saves:
        return Verdict(
            "partly",
            measured,
            "Not on the ramp it was read from, whose logits ignore the canvas; where accepted tokens make their "
            "neighbours confident, a looser bound takes fewer steps.",
        )
    if saves:
        return Verdict("reproduced", measured, "A looser bound takes fewer steps, on the first lab's ramp too.")
    return Verdict("not reproduced", measured, "No looser bound took fewer steps.")


_A = "First lab, experiment A"
_B = "First lab, experiment B"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "untrained-never-stops",
        "An untrained model runs to the cap of 48 steps and accepts exactly one token a step.",
        _A,
        "48 steps, 1.00 a step",
        "01_untrained_model",
        _never_stops,
    ),
    Claim(
        "untrained-uniform-entropy",
        "Its mean entropy stays at the uniform bound, ln of the vocabulary.",
        _A,
        "6.91 nats",
        "01_untrained_model",
        _entropy_uniform,
    ),
    Claim(
        "untrained-tokens-per-forward",
        "The official tokens per forward shows it to be about as efficient as autoregression.",
        _A,
        "1.19 tokens a forward",
        "01_untrained_model",
        _tokens_per_forward,
    ),
    Claim(
        "confidence-is-trained",
        "The speed advantage comes from trained confidence, not from the architecture.",
        _A,
        "stated, from one model whose logits were flat",
        "01_untrained_model",
        _trained_confidence,
    ),
    Claim(
        "growth-sets-steps",
        "How fast confidence grows decides after how many steps a canvas stops.",
        _B,
        "growth 0.5/1/2/4: 31/18/10/6 steps",
        "02_commit_waves",
        _growth,
    ),
    Claim(
        "bound-sets-accepted",
        "The entropy bound decides how many tokens are accepted a step.",
        _B,
        "bound 0.01/0.1/1/10: 29.1/45.9/67.2/90.4 a step",
        "02_commit_waves",
        _accepted,
    ),
    Claim(
        "bound-is-a-speed-knob",
        "The entropy bound is the knob that trades speed against caution.",
        _B,
        "stated; its own results show 18 steps at every bound",
        "02_commit_waves",
        _speed_knob,
    ),
)


def claim(id: str) -> Claim:
    """The claim of this id. Raises LabError when there is none."""
    for found in CLAIMS:
        if found.id == id:
            return found
    raise LabError(f"no claim {id!r}; there are {', '.join(c.id for c in CLAIMS)}")
