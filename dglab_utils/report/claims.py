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
    trained = results.verdict_inputs.get("trained")  # not in runs recorded before there was a trained model
    if trained:
        measured += f"; {trained['model']}, trained: {trained['stopped']} of {trained['canvases']} canvases did"
    if stopped:
        return Verdict("not reproduced", measured, "Random weights, sharpened, stop early: it took no training.")
    if trained and trained["stopped"] <= trained["canvases"] / 2:
        return Verdict("not reproduced", measured, "Most canvases of the trained model run to the cap too.")
    if max(accepted) > 2:
        return Verdict(
            "partly",
            measured,
            "Many tokens a step take confidence, right or wrong, and that takes no training; to stop early the canvas "
            "must agree with itself from step to step, and that no untrained model did"
            + (", while the trained one does." if trained else "."),
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
    trained = [r for r in results.verdict_inputs.get("steps_of_trained", ()) if r["tight"] < r["loose"]]
    if trained:  # not in runs recorded before there was a trained model
        most = max(trained, key=lambda r: r["steps_tight"] - r["steps_loose"])
        measured += f"; trained, on {most['task']}: {most['steps_tight']:.1f} and {most['steps_loose']:.1f} steps"
        if most["steps_loose"] >= most["steps_tight"]:
            return Verdict("not reproduced", measured, "On the trained model no looser bound took fewer steps.")
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


# -- experiments C and D: what a step costs ------------------------------------------------------------------

_NEAR = 0.1  # relative: published times have three digits and no spread, and no two cards are alike


def _near(measured: float, published: float) -> bool:
    return abs(measured - published) <= _NEAR * published


def _step_ratio(results: Results) -> Verdict:
    published = reference("first_lab")["C_speed_model"]
    shape = published["setup"]["shape"]
    theirs = results.find("cost_ratio", shape=shape, way="first lab's")
    full = results.find("cost_ratio", shape=shape, way="step over step")
    measured = (
        f"{theirs.median:.3g} as it was measured there, {full.median:.3g} for whole steps of both kinds "
        f"({full.labels['dtype']}, {full.count} pairs)"
    )
    if not _near(theirs.median, published["ratio"]):
        return Verdict("not reproduced", measured, "On this machine a canvas costs its arithmetic, not its launches.")
    if _near(full.median, published["ratio"]):
        return Verdict("reproduced", measured, "Also when the token pays for its LM head and its draw.")
    return Verdict("partly", measured, "Met as it was measured there, with a token that has no LM head and no draw.")


def _speedup_at(results: Results) -> Verdict:
    published = reference("first_lab")["C_speed_model"]
    ratio = results.find("cost_ratio", shape=published["setup"]["shape"], way="step over step").median
    gains = {steps: 256 / (steps * ratio) for steps in published["speedup_at_steps"]}
    measured = ", ".join(f"{steps} steps: {gain:.3g}" for steps, gain in gains.items())
    if all(_near(gains[steps], value) for steps, value in published["speedup_at_steps"].items()):
        return Verdict("reproduced", measured, "Every published point is met within a tenth.")
    if min(gains.values()) > 1:
        return Verdict("partly", measured, "Block diffusion is faster at all of these steps, by another factor.")
    return Verdict("not reproduced", measured, "At some or all of these steps block diffusion is slower here.")


def _flat_over_size(results: Results) -> Verdict:
    published = reference("first_lab")["D_size_and_batch"]["size_to_ratio"]
    ratios = [m for m in results.measurements if m.name == "cost_ratio" and m.labels.get("study") == "size"]
    if len(ratios) < 2:
        raise LabError(f"{results.experiment} on {results.host}: fewer than two sizes were measured")
    values = [m.median for m in ratios]
    measured = ", ".join(f"{m.labels['shape']}: {m.median:.3g}" for m in ratios)
    if max(values) <= (1 + _NEAR) * max(published.values()):
        return Verdict("reproduced", measured, "A step costs little more than a token at every size.")
    if max(values) <= 1.25 * min(values):
        return Verdict("partly", measured, "The ratio hardly depends on the size, but it is another ratio.")
    return Verdict("not reproduced", measured, "The ratio is larger, and depends on the size.")


def _falls_with_batch(results: Results) -> Verdict:
    published = reference("first_lab")["D_size_and_batch"]["batch_to_ratio"]
    found = [m for m in results.measurements if m.name == "cost_ratio" and m.labels.get("study") == "batch"]
    found.sort(key=lambda m: m.labels["batch"])
    if len(found) < 2:
        raise LabError(f"{results.experiment} on {results.host}: fewer than two batches were measured")
    measured = ", ".join(f"batch {m.labels['batch']}: {m.median:.3g}" for m in found)
    grown = found[-1].median / found[0].median
    if grown < 1.25:
        return Verdict("not reproduced", measured, "The price of a step, in tokens, hardly rises with the batch.")
    points = {m.labels["batch"]: m.median for m in found if m.labels["shape"] == "toy-97m"}
    if points.keys() >= published.keys() and all(_near(points[b], value) for b, value in published.items()):
        return Verdict("reproduced", measured, "Every published point is met within a tenth.")
    return Verdict("partly", measured, f"The price of a step, in tokens, rises {grown:.1f} times; its values differ.")


# -- the cost model: predictions, which no run of a real card has met or missed yet -----------------------------


def _up_to_four(results: Results) -> Verdict:
    low, high = results.verdict_input("speedup_at_typical_steps")
    below = results.verdict_input("speedup_below_published_from_batch")
    later = f", below 4 from {below} requests at once" if below else ""
    return Verdict(
        "not measured here",
        f"predicted {low:.1f} to {high:.1f} at one request, 16 to 12 steps, on {results.verdict_input('card')}{later}",
        "A prediction from published rates, fitted to one card; the released weights did not run here.",
    )


def _advantage_collapses(results: Results) -> Verdict:
    kept = results.verdict_input("share_kept_at_16")
    toy = results.verdict_input("share_kept_at_16_by_the_toy")
    return Verdict(
        "not measured here",
        f"predicted: {kept:.0%} of the advantage is kept at 16 rows; the first lab's toy kept {toy:.0%}",
        "A prediction: what would refute it stands on the page; step times of the real shape on a card decide.",
    )


# -- the trained model ---------------------------------------------------------------------------------------

CLEARLY_MORE = 3.0  # times the steps: what the hardest level of a task takes over its easiest, medians of canvases
WITHOUT_LOSS = 0.02  # of the share of right answers: a difference that is called none
ENOUGH_ANSWERS = 8  # prompts that were timed, for a median with quartiles
ENOUGH_MILLIONS = 50  # weights of a copy: in smaller ones launching costs more than arithmetic
ENOUGH_PROMPTS = 200  # of a kind of task, for a difference of two per cent to mean anything


def _steps_follow_difficulty(results: Results) -> Verdict:
    spans = results.verdict_input("steps_by_task")
    if len({span["closed"] for span in spans.values()}) < 2:
        raise LabError("this run asked one kind of task only; the claim is about both")
    ratios = {task: span["hardest"] / span["easiest"] for task, span in spans.items()}
    most, least = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
    told = [f"{task} {spans[task]['easiest']:.1f} to {spans[task]['hardest']:.1f}" for task in (most, least)]
    measured = "steps from the easiest to the hardest level: most " + ", least ".join(told)
    clearly = [spans[task]["closed"] for task, ratio in ratios.items() if ratio >= CLEARLY_MORE]
    if not clearly:
        return Verdict("not reproduced", measured, "No task takes clearly more steps where it is harder.")
    share = f"{len(clearly)} of {len(ratios)} tasks take {CLEARLY_MORE:g} times the steps or more"
    if len(set(clearly)) == 2:
        return Verdict("reproduced", measured, f"{share}, tasks with one right answer and tasks with many.")
    kind = "one right answer" if clearly[0] else "many right answers"
    return Verdict("partly", measured, f"{share}, all of them with {kind}.")


def _bound_without_loss(results: Results) -> Verdict:
    bounds, kinds = results.verdict_input("bounds"), results.verdict_input("by_kind")
    count = min(curve["count"] for curve in kinds.values())
    if count < ENOUGH_PROMPTS:
        raise LabError(f"this run asked {count} prompts of a kind, too few for differences of {WITHOUT_LOSS:.0%}")
    if any(curve["right"][0] < 0.5 for curve in kinds.values()):
        raise LabError("this run's model is wrong more often than right at the smallest bound; there is little to lose")
    if len(bounds) < 2:
        raise LabError(f"this run has {len(bounds)} entropy bound; a comparison wants a small and a large one")
    saved, told = {}, []
    for kind, curve in kinds.items():
        right, steps = curve["right"], curve["steps"]
        kept = [i for i in range(len(bounds)) if right[i] >= right[0] - WITHOUT_LOSS]
        saved[kind] = steps[0] / min(steps[i] for i in kept)
        told.append(
            f"{kind}: {steps[0]:.1f} to {steps[-1]:.1f} steps, {right[0]:.0%} to {right[-1]:.0%} right, "
            f"{saved[kind]:.1f} times fewer steps without loss"
        )
    measured = f"bound {bounds[0]:g} to {bounds[-1]:g}; " + "; ".join(told)
    if all(times >= 2 for times in saved.values()):
        return Verdict("reproduced", measured, "Twice as few steps or better, without loss, for both kinds of task.")
    if any(times >= 2 for times in saved.values()):
        return Verdict("partly", measured, "So for one kind of task, not for the other.")
    return Verdict("not reproduced", measured, "No bound saved half of the steps without loss.")


# -- other engines -------------------------------------------------------------------------------------------


def _uncached_loses(results: Results) -> Verdict:
    peer, naive, best = "the twin a token at a time", "masked, as published", "masked, + threshold"
    loss, won = (results.find("gain", before=peer, after=way) for way in (naive, best))
    if loss.labels["prompts"] < ENOUGH_ANSWERS:
        raise LabError(f"this run timed {loss.labels['prompts']} prompts, too few; the claim wants {ENOUGH_ANSWERS}")
    per = [results.find("filled", way=way, task="all").median for way in (peer, naive)]
    filled = per[0] / per[1]
    right = [f"{results.find('right', way=way, task='all').labels['mean']:.0%}" for way in (peer, naive, best)]
    measured = (
        f"the same weights: as published {1 / loss.median:.1f} times as long as a token at a time, with cache and "
        f"threshold {1 / won.median:.2f} times; right answers {', '.join(right)}; a filled position, behind the end or "
        f"not, {1 / filled:.1f} times as published"
    )
    low, high = loss.labels["interval"]
    if low >= 1:
        return Verdict("not reproduced", measured, "The published sampler is no slower than its peer here.")
    if high >= 1:
        return Verdict("partly", measured, "Slower for most prompts, but the interval of the median holds 1.")
    if won.labels["interval"][0] > 1:
        why = "So is the published sampler here; with a cache and a threshold the same weights take less time on most."
    else:
        why = "So is the published sampler here, and a cache and a threshold do not clearly make up for it."
    return Verdict("reproduced", measured, why)


def _short_answers_pay(results: Results) -> Verdict:
    lengths = results.verdict_input("processed_by_length")
    if len(lengths) < 2 or lengths[-1]["tokens"] < 2 * lengths[0]["tokens"]:
        raise LabError("this run's answers are of nearly one length")
    short, long = lengths[0], lengths[-1]
    measured = "; ".join(
        f"answers of {end['tokens']:.0f} tokens: {end['processed']:.1f} positions through the model for each"
        for end in (short, long)
    )
    if short["processed"] >= 1.5 * long["processed"]:
        return Verdict(
            "reproduced", measured, "Each step goes over the whole canvas, and shorter answers take hardly fewer."
        )
    return Verdict("not reproduced", measured, "Short answers take as much fewer steps as they have fewer tokens.")


def _cpu_inverts(results: Results) -> Verdict:
    pair = results.verdict_input("pair")
    if pair:
        told = [f"{p['category']}: {p['diffusion']:.3g} against {p['ar']:.3g} {p['unit']}/s" for p in pair]
        slower = [p["diffusion"] < p["ar"] for p in pair]
        measured = "; ".join(told)
        if all(slower):
            return Verdict("reproduced", measured, "The released pair, run here by llama.cpp.")
        if not all(p["unit"] == "tokens" for p in pair):
            raise LabError("the pair ran, but how many of a canvas are tokens is not known; give its tokenizer")
        state: State = "partly" if any(slower) else "not reproduced"
        return Verdict(state, measured, "The released pair, run here by llama.cpp: diffusion is not slower everywhere.")
    if results.verdict_input("pair_failed"):
        raise LabError(f"the released pair did not run to its end: {results.verdict_input('pair_failed')}")
    copies = sorted((m for m in results.measurements if m.name == "gain"), key=lambda m: m.labels["millions"])
    if not copies or copies[-1].labels["millions"] < ENOUGH_MILLIONS:
        raise LabError(f"this run measured no copy of {ENOUGH_MILLIONS} million weights, and not the released pair")
    steps = results.verdict_input("steps")
    published = reference("first_lab")["F_cpu_26b"]["steps"].values()
    if not min(published) <= steps <= max(published):
        raise LabError(f"this run supposed {steps} steps a canvas; {min(published)} to {max(published)} were published")
    ends = (copies[0], copies[-1]) if len(copies) > 1 else copies
    told = [f"{m.median:.2f} times the speed at {m.labels['millions']:.0f}M" for m in ends]
    lost = [m for m in copies if m.labels["interval"][1] < 1]
    measured = (
        f"copies of its shape with random weights, {steps} steps: {', '.join(told)}; "
        f"predicted for a desktop: {results.verdict_input('predicted_gain'):.2f} times"
    )
    low, high = copies[-1].labels["interval"]
    if high < 1:
        return Verdict(
            "partly",
            measured,
            f"Copies from {lost[0].labels['millions']:.0f}M on are slower too; the released pair did not run here.",
        )
    if low > 1:
        return Verdict("not reproduced", measured, "The largest copy that was tried is still faster by diffusion.")
    raise LabError(f"at {copies[-1].labels['millions']:.0f}M both ways are equally fast; try larger copies")


# -- batches ---------------------------------------------------------------------------------------------------


def _half_precision(results: Results) -> list[dict]:
    runs = [run for run in results.verdict_input("runs") if run["dtype"] in ("bfloat16", "float16")]
    if not runs:
        raise LabError("this run computed in float32 only; the report is about bfloat16")
    return runs


def _batch_changes_text(results: Results) -> Verdict:
    runs = [run for run in _half_precision(results) if run["prompts"]]
    if not runs:
        raise LabError("this run compared no whole generations in bfloat16")
    told = [
        f"{r['model']}, {r['dtype']}: {r['text']} of {r['prompts']} texts, {r['stop']} of {r['prompts']} stops, "
        f"{r['any']} of {r['prompts']} with some number that differs"
        for r in runs
    ]
    measured = "; ".join(told)
    if any(run["text"] >= run["prompts"] / 2 for run in runs):
        return Verdict("reproduced", measured, "Most texts depend on the rows beside them, here too.")
    if any(run["text"] for run in runs):
        return Verdict("partly", measured, "Some texts depend on the rows beside them.")
    if any(run["any"] for run in runs):
        return Verdict("partly", measured, "Numbers depend on the rows beside them; no text was seen to change.")
    why = "In half precision every row had the values of its single run on this device."
    others = [run for run in results.verdict_input("runs") if run["prompts"] and run["any"]]
    if others:
        counts = ", ".join(f"{run['dtype']} ({run['any']} of {run['prompts']} requests)" for run in others)
        why += f" Numbers depended on the batch in {counts}."
    return Verdict("not reproduced", measured, why)


def _router_first(results: Results) -> Verdict:
    firsts = {(r["model"], r["dtype"]): r["first"] for r in results.verdict_input("runs") if r["first"]}
    if not firsts:
        raise LabError("nothing differed in this run; where it would begin is not known")
    measured = "; ".join(f"{model}, {dtype}: {first}" for (model, dtype), first in firsts.items())
    router = ["router" in first for first in firsts.values()]
    if all(router):
        return Verdict("reproduced", measured, "The router's projection is the first to differ here too.")
    if any(router):
        return Verdict("partly", measured, "The router's projection is the first to differ in some of the runs.")
    return Verdict("not reproduced", measured, "Here it begins elsewhere; where it does is a matter of the kernels.")


def _two_parts_suffice(results: Results) -> Verdict:
    runs = [run for run in _half_precision(results) if run["any"] and run["report_fix"] is not None]
    if not runs:
        raise LabError("in half precision no whole generation differed in this run, so there was nothing to undo")
    enough = {f"{r['model']}, {r['dtype']}": r["report_fix"] for r in runs}
    measured = "; ".join(f"{name}: {'enough' if yes else 'not enough'}" for name, yes in enough.items())
    if all(enough.values()):
        return Verdict("reproduced", measured, "Router and self-conditioning row by row are enough here too.")
    if any(enough.values()):
        return Verdict("partly", measured, "They are enough for one of the models.")
    return Verdict("not reproduced", measured, "Other operations differ here; the page tells which parts are enough.")


_A = "First lab, experiment A"
_B = "First lab, experiment B"
_C = "First lab, experiment C"
_D = "First lab, experiment D"
_E = "First lab, experiment E"
_F = "First lab, experiment F"
_R = "Report to Transformers, 2026-10-22"
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
    Claim(
        "step-costs-little-more",
        "At 69M parameters and batch 1 a step over 256 positions costs hardly more than one autoregressive token.",
        _C,
        "1.27 times",
        "03_speed_model",
        _step_ratio,
    ),
    Claim(
        "speedup-at-steps",
        "So a canvas is many times faster than 256 tokens, at any number of steps up to the cap.",
        _C,
        "16.77, 12.58 and 4.19 times at 12, 16 and 48 steps",
        "03_speed_model",
        _speedup_at,
    ),
    Claim(
        "ratio-flat-over-size",
        "The cost ratio stays close to one from 17M to 336M parameters.",
        _D,
        "1.08 to 1.24",
        "04_size_and_batch",
        _flat_over_size,
    ),
    Claim(
        "advantage-falls-with-batch",
        "The advantage falls as the batch grows, because a canvas pays for every row and a token does not.",
        _D,
        "a ratio of 1.11 at batch 1, 11.22 at batch 16",
        "04_size_and_batch",
        _falls_with_batch,
    ),
    Claim(
        "steps-follow-difficulty",
        "How many steps a canvas takes follows how hard the text is.",
        "First lab, experiment F, on the released model",
        "5 steps for a trivial prompt, 11 to 19 for others",
        "08_trained_nano",
        _steps_follow_difficulty,
    ),
    Claim(
        "bound-without-loss",
        "Accepting by an entropy bound makes decoding two to three times faster without loss.",
        "arXiv 2505.24857, on masked models",
        "2 to 3 times",
        "09_quality_tradeoff",
        _bound_without_loss,
    ),
    Claim(
        "uncached-fixed-steps-lose",
        "Diffusion alone is not fast: a masked model with its published sampler, which keeps no cache and takes a "
        "fixed number of steps, is slower than its autoregressive peer.",
        f"{_E}, LLaDA-MoE-7B-A1B against Gemma 3 1B and Qwen2.5 1.5B",
        "0.8 to 2.8 positions/s against 4.1 and 13.8 tokens/s",
        "05_diffusion_vs_ar",
        _uncached_loses,
    ),
    Claim(
        "short-answers-pay-a-canvas",
        "A short answer pays for a whole canvas.",
        f"{_F}: a trivial prompt",
        "5 denoising steps over 256 positions for an answer of a few tokens",
        "05_diffusion_vs_ar",
        _short_answers_pay,
    ),
    Claim(
        "cpu-inverts",
        "On a CPU the speed claim inverts: DiffusionGemma is slower there than its autoregressive sibling.",
        f"{_F}, llama.cpp, four-bit weights",
        "0.8 to 1.2 positions/s, whole canvases counted, against 4.2 to 4.6 tokens/s",
        "06_cpu_26b",
        _cpu_inverts,
    ),
    Claim(
        "batch-changes-text",
        "The same request, copied to four rows, mostly gets other texts and other stopping positions than alone.",
        _R,
        "22 of 24 texts, 19 of 24 stopping positions; bfloat16, H100",
        "07_batch_reproducibility",
        _batch_changes_text,
    ),
    Claim(
        "router-differs-first",
        "The first value that depends on the batch is the router's projection.",
        _R,
        "the router on an H100; attention on an A100",
        "07_batch_reproducibility",
        _router_first,
    ),
    Claim(
        "two-parts-row-by-row",
        "Computing the router and the self-conditioning product row by row makes all rows equal their single runs.",
        _R,
        "4 of 4 rows over 293 denoising steps, H100",
        "07_batch_reproducibility",
        _two_parts_suffice,
    ),
    Claim(
        "up-to-four-times",
        "DiffusionGemma generates text up to four times faster than its autoregressive sibling.",
        "Google's announcement",
        "up to 4x",
        "10_cost_model",
        _up_to_four,
    ),
    Claim(
        "advantage-gone-at-16",
        "Hardly anything is left of block diffusion's advantage at 16 rows at once.",
        f"{_D}, on a toy of 97M, read as a statement on the released model",
        "14.4 times at 1 row, 1.4 times at 16",
        "10_cost_model",
        _advantage_collapses,
    ),
)


def claim(id: str) -> Claim:
    """The claim of this id. Raises LabError when there is none."""
    for found in CLAIMS:
        if found.id == id:
            return found
    raise LabError(f"no claim {id!r}; there are {', '.join(c.id for c in CLAIMS)}")
