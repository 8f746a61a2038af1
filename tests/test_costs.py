"""The cost model: FLOPs against PyTorch's counter, bytes against an official step, time and memory against arithmetic
done another way, and published figures that it must or must not meet.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
)

from dglab_utils.errors import LabError
from dglab_utils.measure.costs import (
    COMPONENTS,
    ENGINE,
    OFFICIAL,
    OFFICIAL_STEP,
    PRECISIONS,
    Efficiency,
    Hardware,
    ModelShape,
    Precision,
    causal_pairs,
    expert_coverage,
    forward,
    memory,
    seconds,
)
from dglab_utils.measure.costs_fit import fit
from dglab_utils.measure.costs_published import against_published, calibrate, published_rows, sensitivity
from dglab_utils.measure.costs_serving import (
    LARGEST_BATCH,
    USABLE,
    Drafts,
    Load,
    Setup,
    autoregressive,
    compare,
    serve_autoregressive,
    serve_diffusion,
    setup_of,
)
from dglab_utils.models.shapes import build, shape
from dglab_utils.report.claims import claim
from dglab_utils.report.reference import reference
from dglab_utils.report.results import Results

REAL = ModelShape.from_mapping("real", reference("model_shapes")["diffusiongemma-26B-A4B"])
CARDS = {name: Hardware.from_mapping(name, figures) for name, figures in reference("hardware").items()}
H100 = CARDS["H100 SXM"]
ROWS = published_rows(reference("engines"))
PEAK = reference("engines")["assumed_peak_fraction"]
FITTED = calibrate(ROWS, REAL, CARDS, assumed_peak=PEAK)


# -- FLOPs ---------------------------------------------------------------------------------------------------


def counted(model: DiffusionGemmaForBlockDiffusion, mode: str, batch: int, context: int, tokens: int) -> int:
    """FLOPs of one official forward, by PyTorch's counter."""
    cache = DynamicCache(config=model.config.text_config)
    vocab, canvas = model.config.text_config.vocab_size, model.config.canvas_length
    ids = torch.randint(0, vocab - 5, (batch, context + tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if context:
            model.model.encoder(input_ids=ids[:, :context], cache=cache)
        with FlopCounterMode(display=False) as counter:
            if mode == "canvas":
                logits = torch.zeros(batch, canvas, vocab)
                model(decoder_input_ids=ids[:, context:], cache=cache, self_conditioning_logits=logits)
            else:
                read = model.model.encoder(input_ids=ids[:, context:], cache=cache)
                if mode == "ar":
                    model.lm_head(read.last_hidden_state)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["toy-1m", "toy-17m:dense", "toy-17m:8/2"])
def test_flops_are_those_that_pytorch_counts(name: str) -> None:
    """The counter knows mm and bmm, not grouped_mm (the default of the experts) nor the CPU's fused attention, so both
    are set to `eager`: one product an expert that was hit, and scores for every pair of query and cached key.
    """
    small = replace(shape(name), canvas_length=64)
    model = build(small)
    model.set_attn_implementation("eager")
    model.config.text_config._experts_implementation = "eager"
    sizes = ModelShape.from_config(name, model.config)
    for mode, batch, context, tokens in (
        ("ar", 2, 40, 1),
        ("ar", 1, 300, 1),  # beyond the window of 128
        ("ar", 1, 40, 5),  # checking four drafts
        ("canvas", 1, 40, 64),
        ("canvas", 2, 300, 64),
        ("prefill", 2, 0, 150),
        ("prefill", 1, 150, 64),
    ):
        cost = forward(sizes, mode, batch=batch, context=context, tokens=tokens, skips_masked=False)
        assert sum(cost.flops.values()) == pytest.approx(counted(model, mode, batch, context, tokens), rel=1e-2)


def test_grouped_products_are_not_counted_by_pytorch() -> None:
    """Why the test above sets another implementation; when this fails, it can stop doing so."""
    small = replace(shape("toy-1m"), canvas_length=32)
    model = build(small)
    model.set_attn_implementation("eager")
    model.config.text_config._experts_implementation = "grouped_mm"
    missing = forward(ModelShape.from_config("small", model.config), "canvas", batch=1, context=40, skips_masked=False)
    experts = next(part.flops for part in missing.parts if part.name == "experts")
    assert sum(missing.flops.values()) - experts == counted(model, "canvas", 1, 40, 32)


@pytest.mark.parametrize(("context", "tokens"), [(0, 1), (0, 30), (5, 3), (9, 4), (20, 7), (3, 40)])
@pytest.mark.parametrize("window", [None, 10])
def test_causal_pairs_are_those_of_the_mask(context: int, tokens: int, window: int | None) -> None:
    query, key = np.indices((tokens, context + tokens))
    behind = query + context - key
    allowed = (behind >= 0) & (behind < (window or math.inf))
    assert causal_pairs(context, tokens, window) == allowed.sum()


# -- parameters and experts ----------------------------------------------------------------------------------


def test_parameters_of_the_released_model() -> None:
    published = reference("model_shapes")["diffusiongemma-26B-A4B"]
    assert round(autoregressive(REAL).total_parameters / 1e9, 2) == 25.23
    assert round(REAL.active_parameters / 1e9, 2) == 3.82
    assert REAL.total_parameters == pytest.approx(published["published_total_parameters"], rel=0.01)
    assert REAL.active_parameters == pytest.approx(published["published_active_parameters"], rel=0.01)


def official(config: DiffusionGemmaConfig) -> int:
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(config)
    seen = {id(p): p for name, p in model.named_parameters() if "vision" not in name}
    return sum(p.numel() for p in seen.values())


def test_parameters_are_those_of_the_official_class() -> None:
    text = DiffusionGemmaTextConfig(
        vocab_size=262144,
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        sliding_window=1024,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    )
    config = DiffusionGemmaConfig(text_config=text, vision_config=shape("toy-1m").config().vision_config)
    assert ModelShape.from_config("real", config) == REAL
    assert REAL.total_parameters == official(config)
    for name in ("toy-1m", "toy-17m:8/2"):
        config = shape(name).config()
        assert ModelShape.from_config(name, config).total_parameters == official(config)


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(128, 8, 1), (128, 8, 16), (128, 8, 256), (4, 2, 3)])
def test_expert_coverage_is_that_of_random_choices(experts: int, chosen: int, tokens: int) -> None:
    generator = np.random.default_rng(0)
    touched = [
        np.unique(generator.random((tokens, experts)).argsort(axis=1)[:, :chosen]).size
        for _ in range(40_000 // (tokens * 10))
    ]
    assert expert_coverage(experts, chosen, tokens) == pytest.approx(np.mean(touched), rel=0.02)


# -- bytes ---------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Reads and writes of tensors of one size, in units of that many float32; products and views left out."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.passes = numel, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::mm", "aten::bmm", "aten::_unsafe_view"):
            read = {id(t): t for t in tree_leaves((args, kwargs)) if self.is_one(t)}  # x == x reads x once
            written = [t for t in tree_leaves(out) if self.is_one(t)]
            self.passes += sum(t.element_size() for t in (*read.values(), *written)) / 4
        return out

    def is_one(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.numel() == self.numel


def test_vocabulary_sized_traffic_is_that_of_an_official_step() -> None:
    """One step more, in bfloat16, as the hooks of PyTorch's dispatcher see it. Self-conditioning adds a softmax: on a
    CPU its cast is an operation of its own (5 passes), on a GPU a part of it (3, as the model has it).
    """
    model = build(replace(shape("toy-1m"), canvas_length=32), dtype="bfloat16")

    def passes(steps: int) -> float:
        with Traffic(32 * 1000) as traffic:
            model.generate(
                torch.ones(1, 8, dtype=torch.long),
                max_new_tokens=32,
                max_denoising_steps=steps,
                confidence_threshold=1e-9,
                eos_token_id=5000,
                pad_token_id=0,
            )
        return traffic.passes

    assert passes(4) - passes(3) == pytest.approx(sum(OFFICIAL_STEP.values()) + 5)
    assert OFFICIAL.canvas_passes == 40


def test_bytes_add_up() -> None:
    """At batch 1 and without context almost all that a token moves is the weights it is routed to."""
    tiny = Precision("weights alone", 1.0, 1.0, 0.0, 0.0)
    token = forward(REAL, "ar", batch=1, context=0, precision=tiny, software=replace(ENGINE, token_passes=0))
    assert sum(token.bytes.values()) == pytest.approx(REAL.active_parameters, rel=1e-3)
    canvas = forward(REAL, "canvas", batch=64, context=0, precision=tiny, software=replace(ENGINE, canvas_passes=0))
    embedding = REAL.embedding_parameters  # read by the LM head and by self-conditioning
    softmax = 2 * 4 * 64 * 256 * REAL.vocab
    looked_up = 64 * 256 * REAL.hidden
    expected = REAL.total_parameters + embedding + softmax + looked_up
    assert sum(canvas.bytes.values()) == pytest.approx(expected, rel=1e-3)


def test_every_byte_and_flop_has_a_component() -> None:
    for mode in ("ar", "canvas", "prefill"):
        cost = forward(REAL, mode, batch=3, context=2000, tokens=7)
        assert tuple(cost.flops) == tuple(cost.bytes) == COMPONENTS
        assert sum(cost.flops.values()) == pytest.approx(sum(part.flops for part in cost.parts))
        assert sum(cost.bytes.values()) == pytest.approx(sum(part.bytes for part in cost.parts))
    assert cost.flops["LM head"] == cost.bytes["sampler"] == 0  # prefill has no head


# -- time and memory -----------------------------------------------------------------------------------------


def test_a_part_takes_the_longer_of_moving_and_multiplying() -> None:
    half = Efficiency(0.5, 0.25, 1e-4)
    cost = forward(REAL, "canvas", batch=8, context=1024, precision=PRECISIONS["fp8"])
    time = seconds(cost, H100, half)
    expected = 0.0
    for part in cost.parts:
        peak = 1979e12 if part.products == "fp8" else 990e12
        expected += max(part.bytes / (3350e9 * 0.5), part.flops / (peak * 0.25))
    assert time.total == pytest.approx(expected + 30 * 1e-4)
    bounds = {
        max((p.bytes / 3350e9, "moving"), (p.flops / H100.peak(p.products), "multiplying"))[1] for p in cost.parts
    }
    assert bounds == {"moving", "multiplying"}


NOTHING_BUT_FORWARDS = Hardware("free", 1e30, 1e30, 1e12)
A_SECOND_A_LAYER = Setup(NOTHING_BUT_FORWARDS, PRECISIONS["bf16"], Efficiency(1, 1, 1.0))


@pytest.mark.parametrize(("output", "canvases"), [(1, 1), (256, 1), (257, 2), (1024, 4)])
def test_requests_run_the_forwards_they_should(output: int, canvases: int) -> None:
    """Where nothing takes time but a layer's overhead, of one second, time counts layers."""
    load = Load(batch=3, prompt=100, output=output, steps=16)
    served = serve_diffusion(REAL, load, A_SECOND_A_LAYER)
    assert served.total == pytest.approx(30 * (1 + 16 * canvases + canvases - 1))
    assert served.first == pytest.approx(30 * (1 + 16))
    assert served.rate == pytest.approx(3 * output / served.total)
    token = serve_autoregressive(autoregressive(REAL), load, A_SECOND_A_LAYER)
    assert token.total == pytest.approx(30 * output) and token.first == pytest.approx(30)
    drafts = Drafts(4, 0.8)
    drafted = serve_autoregressive(autoregressive(REAL), load, A_SECOND_A_LAYER, drafts)
    assert drafted.total == pytest.approx(30 + (output - 1) / drafts.tokens_a_round * (30 + 4))


def test_tokens_a_round_are_those_of_simulated_rounds() -> None:
    accepted = np.random.default_rng(0).random((200_000, 4)) < 0.8
    assert Drafts(4, 0.8).tokens_a_round == pytest.approx(1 + accepted.cumprod(axis=1).sum(axis=1).mean(), rel=5e-3)


def test_memory_is_weights_cache_and_buffers() -> None:
    sixteen = PRECISIONS["bf16"]
    one = memory(REAL, "canvas", batch=1, context=5000, precision=sixteen)
    assert one.weights == 2 * REAL.total_parameters
    # 25 layers keep a window, 5 everything; keys and values, also where they share a projection
    assert one.cache == 2 * 2 * (25 * 1024 * 8 * 256 + 5 * 5000 * 2 * 512)
    assert one.vocabulary == 6 * 256 * 262144 * 4
    assert memory(REAL, "canvas", batch=7, context=5000).total - one.weights == pytest.approx(
        7 * (one.cache + one.vocabulary)
    )


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_the_largest_batch_is_the_last_that_fits(precision: str) -> None:
    setup = setup_of(H100, precision, FITTED)
    served = serve_diffusion(REAL, Load(1, 1024, 1024, 16), setup)

    def needed(batch: int) -> float:
        return memory(REAL, "canvas", batch=batch, context=2048, precision=setup.precision).total

    assert needed(served.fits) <= USABLE * 80e9 < needed(served.fits + 1)
    assert serve_diffusion(REAL, Load(1, 1024, 1024, 16), setup_of(CARDS["L4"], "bf16", FITTED)).fits == 0


def test_the_break_even_is_where_the_speedup_crosses_one() -> None:
    setup = setup_of(H100, "fp8", FITTED)
    found = compare(REAL, Load(1, 1024, 1024, 16), setup)
    assert found.break_even is not None and 1 < found.break_even < LARGEST_BATCH
    before, at = (
        compare(REAL, Load(b, 1024, 1024, 16), setup).speedup for b in (found.break_even - 1, found.break_even)
    )
    assert before > 1 >= at
    assert compare(REAL, Load(1, 1024, 1024, 1), setup).break_even is None
    assert compare(REAL, Load(1, 1024, 1024, 256), setup).break_even == 1


# -- fitted and published ------------------------------------------------------------------------------------


def test_a_fit_finds_the_numbers_that_made_the_times() -> None:
    truth = Efficiency(0.8, 0.4, 2e-5)
    costs = [
        forward(REAL, mode, batch=b, context=512, tokens=t)
        for mode, b, t in (("ar", 1, 1), ("ar", 64, 1), ("canvas", 1, None), ("canvas", 64, None), ("prefill", 8, 900))
    ]
    predictions = [lambda e, cost=cost: seconds(cost, H100, e).total for cost in costs]
    found = fit(predictions, [p(truth) for p in predictions], start=Efficiency(0.5, 0.5, 1e-4))
    assert (found.bandwidth, found.peak, found.overhead) == pytest.approx((0.8, 0.4, 2e-5), rel=1e-3)


def test_a_kink_does_not_hold_the_search() -> None:
    """Noisy times of a roofline: no point of a coarse grid is nearer to them than what the fit found.

    One search from the start given here stops at a kink, a tenth worse.
    """
    draw = np.random.default_rng(26)
    memory = 10 ** draw.uniform(-3, 0, 12)
    arithmetic = memory * 10 ** draw.uniform(-1, 1, 12)
    truth = np.maximum(memory / 0.5, arithmetic / 0.4) + 1e-3
    times = truth * np.exp(draw.normal(0, 0.5, 12))
    predictions = [
        lambda e, m=m, a=a: max(m / e.bandwidth, a / e.peak) + e.overhead
        for m, a in zip(memory, arithmetic, strict=True)
    ]
    found = fit(predictions, times, start=Efficiency(0.5, 0.5, 1e-4), highest=10)
    missed = sum(np.log(p(found) / t) ** 2 for p, t in zip(predictions, times, strict=True))
    bandwidth, peak, overhead = np.meshgrid(
        np.geomspace(0.1, 10, 60), np.geomspace(0.1, 10, 60), np.geomspace(1e-5, 0.1, 60)
    )
    grid = sum(
        np.log((np.maximum(m / bandwidth, a / peak) + overhead) / t) ** 2
        for m, a, t in zip(memory, arithmetic, times, strict=True)
    )
    assert missed <= grid.min()


def test_only_h100_rows_calibrate_and_they_are_met() -> None:
    rows = against_published(ROWS, REAL, CARDS, FITTED)
    calibrated = [row for row in rows if row.published.use == "calibrate"]
    assert {row.published.hardware for row in calibrated} == {"H100 SXM"} and len(calibrated) == 2
    assert all(abs(row.error) < 1e-4 for row in calibrated)
    assert FITTED.peak == PEAK and 0 < FITTED.bandwidth < 1
    assert 0.5e-3 < 30 * FITTED.overhead < 10e-3


def test_every_published_row_is_predicted_or_has_a_reason() -> None:
    rows = {row.published.id: row for row in against_published(ROWS, REAL, CARDS, FITTED)}
    assert len(rows) == len(ROWS)
    for row in rows.values():
        assert (row.error is None) == (row.predicted is None) == (row.published.use == "silent")
        assert row.published.source and (row.published.why if row.error is None else row.published.metric)
    for id in ("h200-ar", "h200-diffusion"):
        assert abs(rows[id].error) < 0.1  # another card, same software: what the model is for
    assert rows["l4-step"].error < -0.3  # and where it fails, it is not tuned away


def test_the_assumed_peak_hardly_moves_what_was_published_for_one_row() -> None:
    errors = sensitivity(ROWS, REAL, CARDS, (0.5, 0.9))
    assert set(errors) == {row.id for row in ROWS if row.use == "predict"}
    assert abs(errors["h200-diffusion"][0] - errors["h200-diffusion"][1]) < 0.1


def test_the_advantage_outlasts_the_first_lab_s_batch_of_16() -> None:
    """The prediction of the notebook: the toy's fell to a tenth from batch 1 to 16."""
    setup = setup_of(H100, "fp8", FITTED)
    one, sixteen = (compare(REAL, Load(b, 1024, 1024, 16), setup) for b in (1, 16))
    assert sixteen.speedup / one.speedup > 2 * 1.4 / 14.4
    grown = {c: sixteen.diffusion.step.by_component[c] - one.diffusion.step.by_component[c] for c in COMPONENTS}
    vocabulary = grown["LM head"] + grown["self-conditioning"] + grown["sampler"]
    assert vocabulary > 0.5 * sum(grown.values())


# -- bad input -----------------------------------------------------------------------------------------------

GOOD_ROW = {"id": "x", "what": "", "source": "", "use": "predict", "metric": "rate", "published": 1}
BAD = {
    "mode": (lambda: forward(REAL, "encode", batch=1, context=0), "mode 'encode'"),
    "canvas of a sibling": (lambda: forward(autoregressive(REAL), "canvas", batch=1, context=0), "no self-condition"),
    "prefill of nothing": (lambda: forward(REAL, "prefill", batch=1, context=0), "tokens None"),
    "batch": (lambda: forward(REAL, "ar", batch=0, context=0), "batch 0"),
    "shape": (lambda: ModelShape.from_mapping("s", {"hidden": 0}), "shape s: hidden is 0"),
    "hardware": (lambda: Hardware.from_mapping("h", {"bandwidth_GB_s": 1}), "hardware h: 'bf16_TFLOP_s'"),
    "no bandwidth": (lambda: Hardware("h", 0, 1, 1), "hardware h: bandwidth is 0"),
    "precision": (lambda: setup_of(H100, "int3", FITTED), "precision 'int3'"),
    "load": (lambda: Load(1, 0, 1, 1), "prompt 0"),
    "acceptance": (lambda: Drafts(4, 1.0), "acceptance 1.0"),
    "fit": (lambda: fit([], [], start=FITTED), "3 numbers to 0 figures"),
    "free": (lambda: fit([lambda e: 1.0], [1.0], start=FITTED, free=("speed",)), "no number 'speed'"),
    "use": (lambda: published_rows({"rows": [{"id": "x", "use": "guess"}]}), "row x: use 'guess'"),
    "key": (lambda: published_rows({"rows": [GOOD_ROW | {"rows": 4}]}), "row x: .*rows"),
    "value": (lambda: published_rows({"rows": [GOOD_ROW | {"published": "fast"}]}), "row x: 'fast'"),
    "unknown card": (
        lambda: against_published(published_rows({"rows": [GOOD_ROW]}), REAL, CARDS, FITTED),
        "row x: no hardware ''",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str) -> None:
    wrong, message = BAD[case]
    with pytest.raises(LabError, match=message) as error:
        wrong()
    assert "\n" not in str(error.value)


# -- claims --------------------------------------------------------------------------------------------------


def predicted(**changes) -> Results:
    made = Results.begin("10_cost_model", {})
    made.verdict_inputs = {
        "card": "H100 SXM",
        "speedup_at_typical_steps": [5.1, 6.7],
        "speedup_below_published_from_batch": 4,
        "share_kept_at_16": 0.44,
        "share_kept_at_16_by_the_toy": 0.097,
        **changes,
    }
    return made


def test_a_prediction_is_no_verdict() -> None:
    """However good the prediction is, the claims on the released model stay open."""
    four = claim("up-to-four-times").verdict(predicted())
    assert four.state == "not measured here"
    assert "5.1 to 6.7" in four.measured and "below 4 from 4 requests" in four.measured
    assert (
        "below 4" not in claim("up-to-four-times").verdict(predicted(speedup_below_published_from_batch=None)).measured
    )
    gone = claim("advantage-gone-at-16").verdict(predicted())
    assert gone.state == "not measured here" and "44%" in gone.measured and "10%" in gone.measured
