"""A row's draws do not depend on its batch."""

from __future__ import annotations

import pytest
import torch
from small import NO_EOS, generate, scripted, sure_after
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from dglab_utils.errors import LabError
from dglab_utils.sampling.noise import RowNoiseSampler, row_noise
from dglab_utils.sampling.observe import observe


def sampler(*seeds: int) -> RowNoiseSampler:
    made = RowNoiseSampler(seeds, config=EntropyBoundSamplerConfig(entropy_bound=1e9), canvas_length=6, vocab_size=50,
                           max_denoising_steps=4)  # fmt: skip
    made.begin_canvas(torch.device("cpu"))
    return made


def test_draws_follow_the_row_seed_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    alone, among = sampler(11), sampler(4, 11, 9)
    canvas = alone.initialize_canvas(1, torch.device("cpu"))
    neighbours = among.initialize_canvas(3, torch.device("cpu"))
    assert torch.equal(canvas[0], neighbours[1])
    assert not torch.equal(neighbours[0], neighbours[1])
    for _ in range(3):  # candidates, then renoise, step after step
        drawn = alone.accept_canvas(canvas, canvas, logits[None], 1)
        beside = among.accept_canvas(neighbours, neighbours, logits.expand(3, -1, -1), 1)
        assert torch.equal(drawn[0], beside[1])
        assert torch.equal(alone.initialize_canvas(1, "cpu")[0], among.initialize_canvas(3, "cpu")[1])


def test_candidates_have_the_distribution_of_the_logits():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2] + [1e-9] * 47)).expand(1, 6, 50)
    one = sampler(3)
    empty = torch.zeros(1, 6, dtype=torch.long)
    drawn = torch.stack([one.accept_canvas(empty, empty, logits, 1) for _ in range(1500)])  # 9,000 draws
    share = [(drawn == token).float().mean().item() for token in range(3)]
    assert share == pytest.approx([0.5, 0.3, 0.2], abs=0.03)  # six standard deviations


def test_copies_of_a_row_differ_by_their_noise_alone(model, prompts):
    copies = prompts[:1].expand(3, -1)
    with observe(model, seed=0) as traces:
        model.generate(copies, max_new_tokens=32, max_denoising_steps=3, **NO_EOS)
    assert len({t.digest_of("current") for t in traces}) == 3, "the control: one generator for the whole batch"
    with observe(model, row_seeds=[8, 8, 9]) as traces:
        model.generate(copies, max_new_tokens=32, max_denoising_steps=3, **NO_EOS)
    first, second, third = (t.current[0].tolist() for t in traces)
    assert first == second != third
    assert [t.seed for t in traces] == [8, 8, 9]


def test_every_canvas_has_noise_of_its_own(model, prompts):
    with observe(model, row_seeds=[8]) as traces:
        generate(model, prompts[:1], max_new_tokens=64, max_denoising_steps=2)
    assert traces[0].current[0].tolist() != traces[1].current[0].tolist()


@pytest.mark.parametrize("seed", [-3, 1.5, "7"])
def test_seeds_are_integers_from_zero(model, prompts, seed):
    with pytest.raises(LabError, match="seeds are integers from 0"), observe(model, row_seeds=[seed]):
        generate(model, prompts[:1], max_new_tokens=32)


def test_a_straggler_does_not_shift_the_next_canvas(model, prompts):
    def second_canvas(*steps: int) -> list[int]:
        script = scripted(sure_after(*steps), 8)
        with observe(model, row_seeds=[8, 5][: len(steps)]) as traces:
            generate(model, prompts[: len(steps)], max_new_tokens=64, logits_processor=script)
        return next(t.current[0].tolist() for t in traces if (t.canvas, t.row) == (1, 0))

    assert second_canvas(0) == second_canvas(0, 6)


def test_observing_row_noise_changes_nothing(model, prompts):
    with row_noise(model, [1, 2, 3]):
        plain = generate(model, prompts, max_new_tokens=64)
    with observe(model, row_seeds=[1, 2, 3]) as traces:
        seen = generate(model, prompts, max_new_tokens=64)
    assert torch.equal(plain.sequences, seen.sequences)
    trace = traces[0]
    assert (trace.current[1][trace.accepted[0]] == trace.sampled[0][trace.accepted[0]]).all()


def test_one_seed_a_row(model, prompts):
    with pytest.raises(LabError, match="2 seeds for a batch of 3 rows"), row_noise(model, [1, 2]):
        generate(model, prompts, max_new_tokens=32)
